#!/usr/bin/env bash
# Builds the GPU microbenchmarks with the nvcc in NVCC or PATH, checks a small run with compute-sanitizer where that is there,
# and prints JSON lines with date, machine and command: benches/gpu/run.sh >> benches/results/gpu_micro.jsonl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
binary=$(mktemp -d)/micro
"${NVCC:-nvcc}" -O3 -std=c++17 -arch="${ARCH:-native}" -Xptxas -v -o "$binary" micro.cu 2> >(grep -E "error|warning|spill|registers" >&2 || true)
if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --tool memcheck --error-exitcode 3 "$binary" 18 >&2
    compute-sanitizer --tool racecheck --error-exitcode 3 "$binary" 18 >&2
fi
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo "${DOVETAIL_COMMIT:-unknown}")
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1)
"$binary" | while read -r line; do
    printf '{"benchmark":"gpu_micro","date":"%s","commit":"%s","machine":"%s","command":"benches/gpu/run.sh",%s\n' \
        "$(date -u +%FT%TZ)" "$commit" "$gpu" "${line#\{}"
done
