#!/usr/bin/env bash
# Builds the GPU benchmarks with the nvcc in NVCC or PATH, checks small runs with compute-sanitizer where that is there, and
# prints JSON lines with date, commit, machine and command:
#
#   benches/gpu/run.sh micro >> benches/results/gpu_micro.jsonl
#   benches/gpu/run.sh radix_join >> benches/results/gpu_radix_join.jsonl
#   benches/gpu/run.sh cuco_join >> benches/results/gpu_cuco_join.jsonl
#
# cuco_join takes the headers of cuCollections and of the CCCL that it needs from LIBRAFT, the folder `libraft` of an installed
# wheel libraft-cu13, or installs that wheel in a temporary folder (20 MB).
#
# On a machine without an nvcc, BINARY names the program, built elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
name=${1:?which one: micro, radix_join or cuco_join}
tools=(memcheck racecheck)
options=()
case $name in
    micro) small=(18) ;;
    radix_join) small=(16 16) ;;
    cuco_join) small=(16 16) tools=(memcheck) ;;
    *) echo "there is no benchmark $name: there are micro, radix_join and cuco_join" >&2 && exit 2 ;;
esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${BINARY:-} ]]; then
    if [[ $name == cuco_join ]]; then
        # The cuCollections that cuDF 25.12 is built with: both projects pin it by the same list. It has no releases of its own.
        if [[ -z ${LIBRAFT:-} ]]; then
            python3 -m pip install -q --no-deps --target "$folder/headers" libraft-cu13==25.12.0 >&2
            LIBRAFT=$folder/headers/libraft
        fi
        options=(--expt-relaxed-constexpr --expt-extended-lambda -I "$LIBRAFT/include/rapids" -I "$LIBRAFT/include")
    fi
    BINARY=$folder/$name
    "${NVCC:-nvcc}" -O3 -std=c++17 -arch="${ARCH:-native}" "${options[@]}" -o "$BINARY" "$name.cu"
fi
if command -v compute-sanitizer >/dev/null; then
    for tool in "${tools[@]}"; do
        compute-sanitizer --tool "$tool" --error-exitcode 3 "$BINARY" "${small[@]}" >&2
    done
fi
commit=${DOVETAIL_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1)
"$BINARY" | while read -r line; do
    printf '{"benchmark":"gpu_%s","date":"%s","commit":"%s","machine":"%s","command":"benches/gpu/run.sh %s",%s\n' \
        "$name" "$(date -u +%FT%TZ)" "$commit" "$gpu" "$name" "${line#\{}"
done
