#!/usr/bin/env bash
# Builds the GPU benchmarks with the nvcc in NVCC or PATH, checks small runs with compute-sanitizer where that is there, and
# prints JSON lines with date, commit, machine and command:
#
#   benches/gpu/run.sh micro >> benches/results/gpu_micro.jsonl
#   benches/gpu/run.sh radix_join >> benches/results/gpu_radix_join.jsonl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
name=${1:?which one: micro or radix_join}
case $name in
    micro) small=(18) ;;
    radix_join) small=(16 16) ;;
    *) echo "there is no benchmark $name" >&2 && exit 2 ;;
esac
binary=$(mktemp -d)/$name
"${NVCC:-nvcc}" -O3 -std=c++17 -arch="${ARCH:-native}" -o "$binary" "$name.cu"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool --error-exitcode 3 "$binary" "${small[@]}" >&2
    done
fi
commit=${DOVETAIL_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1)
"$binary" | while read -r line; do
    printf '{"benchmark":"gpu_%s","date":"%s","commit":"%s","machine":"%s","command":"benches/gpu/run.sh %s",%s\n' \
        "$name" "$(date -u +%FT%TZ)" "$commit" "$gpu" "$name" "${line#\{}"
done
