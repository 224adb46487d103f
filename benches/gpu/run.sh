#!/usr/bin/env bash
# Builds a GPU benchmark, checks a small run of it with compute-sanitizer where that is there, and prints JSON lines with date,
# commit, machine and command:
#
#   benches/gpu/run.sh micro >> benches/results/gpu_micro.jsonl              more arguments go to the benchmark
#   benches/gpu/run.sh radix_join >> benches/results/gpu_radix_join.jsonl
#   benches/gpu/run.sh cluster_join >> benches/results/gpu_cluster_join.jsonl
#   benches/gpu/run.sh cuco_join >> benches/results/gpu_cuco_join.jsonl
#   benches/gpu/run.sh --build FOLDER [NAME ...]                             only builds all of them, or these, as FOLDER/gpu-NAME
#
# BINARY                        the program, built elsewhere, for a machine without an nvcc
# SANITIZE=0                    no small run with compute-sanitizer first
# NVCC, CUDA_HOME               where nvcc is, as for the server (kernels/build.rs)
# DOVETAIL_CUDA_ARCHITECTURES   what to compile for (default: the first GPU of this machine; with --build, what the server's kernels
#                               are compiled for)
# LIBRAFT                       the folder `libraft` of an installed wheel libraft-cu13, with the headers of cuCollections and of
#                               the CCCL that cuco_join needs (default: that wheel is installed in a temporary folder; 20 MB)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/record.sh"
names=(micro radix_join cluster_join cuco_join)
usage() {
    # Standard output may be a file of results.
    [[ $# == 0 ]] || echo "$1" >&2
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

find_nvcc() {
    local nvcc=${NVCC:-}
    [[ -n $nvcc || -z ${CUDA_HOME:-} || ! -x $CUDA_HOME/bin/nvcc ]] || nvcc=$CUDA_HOME/bin/nvcc
    [[ -n $nvcc ]] || nvcc=$(command -v nvcc || true)
    [[ -n $nvcc || ! -x /usr/local/cuda/bin/nvcc ]] || nvcc=/usr/local/cuda/bin/nvcc
    [[ -n $nvcc ]] || { echo "no nvcc was found: set NVCC or CUDA_HOME, or BINARY to run a program that was built elsewhere" >&2; return 1; }
    command -v "$nvcc" || { echo "NVCC is $nvcc, and there is no such program" >&2; return 1; }
}

# compile NAME ARCHITECTURES PROGRAM
compile() {
    local name=$1 architectures=${2//,/ } program=$3 options=() nvcc root architecture newest=0 libraries
    nvcc=$(find_nvcc)
    root=$(dirname "$(dirname "$(realpath "$nvcc")")")
    # The runtime is linked statically, by default; the wheels keep it in a folder that nvcc does not know.
    for libraries in "$root"/{lib64,lib,targets/x86_64-linux/lib,targets/sbsa-linux/lib}; do
        [[ ! -e $libraries/libcudart_static.a ]] || options+=(-L "$libraries")
    done
    for architecture in $architectures; do
        local as=$architecture
        # Multicast to clusters is for code of one architecture or family.
        if [[ $name == micro ]]; then
            case $architecture in
                90) as=90a ;;
                10? | 11?) as=${architecture}f ;;
            esac
        fi
        options+=(-gencode "arch=compute_$as,code=sm_$as")
        ((architecture <= newest)) || newest=$architecture
    done
    options+=(-gencode "arch=compute_$newest,code=compute_$newest")
    if [[ $name == cuco_join ]]; then
        # The cuCollections that cuDF 25.12 is built with: both projects pin it by the same list. It has no releases of its own.
        if [[ -n ${LIBRAFT:-} ]]; then
            LIBRAFT=$(realpath "$LIBRAFT")
        else
            python3 -m pip install -q --no-deps --target "$folder/headers" libraft-cu13==25.12.0 >&2
            LIBRAFT=$folder/headers/libraft
        fi
        options+=(--expt-relaxed-constexpr --expt-extended-lambda -I "$LIBRAFT/include/rapids" -I "$LIBRAFT/include")
    fi
    # From there, so that errors which the program tells name no folder of this machine.
    (cd "$here" && "$nvcc" -O3 -std=c++17 -Xfatbin -compress-all --threads 0 "${options[@]}" -o "$program" "$name.cu" >&2)
}

if [[ ${1:-} == --build ]]; then
    [[ $# -ge 2 ]] || usage
    [[ $# == 2 ]] || names=("${@:3}")
    for name in "${names[@]}"; do [[ -e $here/$name.cu ]] || usage "there is no benchmark $name"; done
    build=$here/../../kernels/build.rs
    architectures=${DOVETAIL_CUDA_ARCHITECTURES:-$(sed -n 's/^const ARCHITECTURES: &str = "\([0-9,]*\)";$/\1/p' "$build")}
    [[ -n $architectures ]] || { echo "$build does not say what to compile for" >&2; exit 1; }
    to=$(cd "$2" && pwd)
    for name in "${names[@]}"; do compile "$name" "$architectures" "$to/gpu-$name"; done
    exit
fi

name=${1:-}
case $name in
    micro) small=(18) tools=(memcheck racecheck) ;;
    radix_join) small=(16 16) tools=(memcheck racecheck) ;;
    # The other tools do not know bulk copies between blocks: memcheck takes them for writes out of place, racecheck does not end.
    cluster_join) small=(14 14) tools=(synccheck initcheck) ;;
    cuco_join) small=(16 16) tools=(memcheck) ;;
    "" | -h | --help) usage ;;
    *) usage "there is no benchmark $name" ;;
esac
shift
if [[ -z ${BINARY:-} ]]; then
    BINARY=$folder/$name
    if [[ -z ${DOVETAIL_CUDA_ARCHITECTURES:-} ]]; then
        DOVETAIL_CUDA_ARCHITECTURES=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .) ||
            { echo "nvidia-smi tells of no GPU here; DOVETAIL_CUDA_ARCHITECTURES says what to compile for" >&2; exit 1; }
    fi
    compile "$name" "$DOVETAIL_CUDA_ARCHITECTURES" "$BINARY"
fi
if [[ ${SANITIZE:-1} != 0 ]] && command -v compute-sanitizer >/dev/null; then
    for tool in "${tools[@]}"; do
        compute-sanitizer --tool "$tool" --error-exitcode 3 "$BINARY" "${small[@]}" >&2
    done
fi
"$BINARY" "$@" | record "gpu_$name" "benches/gpu/run.sh $name${*:+ $*}"
