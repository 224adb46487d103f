#!/usr/bin/env bash
# Measures other values of the sizes in kernels/, one at a time: the same benchmarks with libraries of kernels that differ in one constant.
#
#   benches/gpu/tune.sh FOLDER         here, with an nvcc: the benchmarks, and a library for each value that tune.txt names, in FOLDER
#   FOLDER/tune [FILE ...]             on a machine with a GPU: measures all of them, or those of these files; JSON lines
#
# NVCC, CUDA_HOME               where nvcc is, as for the server (kernels/build.rs)
# DOVETAIL_CUDA_ARCHITECTURES   what to compile for (default: 90)
set -euo pipefail
[[ $# == 1 ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$1"/libraries
to=$(cd "$1" && pwd)
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/nvcc}}
nvcc=$(realpath "$(command -v "${nvcc:-nvcc}")")
root=$(dirname "$(dirname "$nvcc")")
options=(-std=c++17 -O3 -Xcompiler -fPIC -Xfatbin -compress-all -I "$root/include/cccl")
for libraries in "$root"/{lib64,lib,targets/x86_64-linux/lib,targets/sbsa-linux/lib}; do
    [[ ! -e $libraries/libcudart_static.a ]] || options+=(-L "$libraries")
done
architectures=${DOVETAIL_CUDA_ARCHITECTURES:-90}
for architecture in ${architectures//,/ }; do
    options+=(-gencode "arch=compute_$architecture,code=sm_$architecture")
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# objects SOURCES TO NAME ...: objects of these files of kernels.
objects() {
    local name
    for name in "${@:3}"; do "$nvcc" "${options[@]}" -c -o "$2/$name.o" "$1/$name.cu"; done
}
# library NAME FOLDER: of the objects there, and of all others as they are.
library() {
    local object files=()
    for object in "$work"/as-they-are/*.o; do
        if [[ -e $2/$(basename "$object") ]]; then files+=("$2/$(basename "$object")"); else files+=("$object"); fi
    done
    mkdir -p "$to/libraries/$1"
    "$nvcc" "${options[@]}" -shared -o "$to/libraries/$1/libdovetail_kernels.so" "${files[@]}"
    strip "$to/libraries/$1/libdovetail_kernels.so"
}
mkdir "$work/as-they-are"
mapfile -t all < <(cd kernels && ls ./*.cu | sed 's#^\./##; s#\.cu$##')
objects kernels "$work/as-they-are" "${all[@]}"
library as-they-are "$work/as-they-are"

while read -r file constant values command; do
    [[ -n $file && $file != \#* ]] || continue
    for value in ${values//,/ }; do
        name=$file-$constant-$value
        changed=$work/$name
        mkdir "$changed" && cp kernels/*.cu kernels/*.cuh kernels/*.h "$changed"
        VALUE=$value perl -pi -e 's/\b(constexpr u(?:32|64) (?:\w+ = [^,;]+, )*'"$constant"' = )[^,;]+/$1$ENV{VALUE}/' "$changed/$file"
        ! cmp --quiet "kernels/$file" "$changed/$file" || { echo "kernels/$file has no constant $constant other than $value" >&2; exit 1; }
        # What includes a header is compiled anew with it.
        mapfile -t affected < <(cd "$changed" && if [[ $file == *.cu ]]; then echo "${file%.cu}"; else grep -l "\"$file\"" ./*.cu | sed 's#^\./##; s#\.cu$##'; fi)
        objects "$changed" "$changed" "${affected[@]}"
        library "$name" "$changed"
        rm -r "$changed"
    done
done <benches/gpu/tune.txt

# The programs differ in nothing, and it is kernels that are timed; but unoptimised, they take most of the time to make their data.
DOVETAIL_CUDA_LIBRARY=$to/libraries/as-they-are cargo build --locked --release -p dovetail-bench --bench primitives --bench resident --message-format=json-render-diagnostics |
    python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["kind"] == ["bench"]:
        print(message["target"]["name"], message["executable"])' |
    while read -r name executable; do strip -o "$to/bench-$name" "$executable"; done
cp benches/gpu/tune.txt benches/gpu/record.sh "$to/"
python3 -c 'import sys; sys.path.insert(0, "benches"); import common; print(common.commit())' >"$to/commit"
cat >"$to/tune" <<'TUNE'
#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./record.sh
DOVETAIL_COMMIT=$(cat commit)
export DOVETAIL_COMMIT
# measure LIBRARY CHANGED TO PROGRAM ARGUMENT ...
measure() {
    local program=$4 lines
    lines=$(LD_LIBRARY_PATH=libraries/$1 "./bench-$program" --device cuda:0 --threads "$(nproc)" "${@:5}")
    sed 's/^{/{"changed":"'"$2"'","to":"'"$3"'",/' <<<"$lines" | record gpu_tuning "cargo bench -p dovetail-bench --bench $program -- --device cuda:0 ${*:5}"
}
while read -r file constant values command; do
    [[ -n $file && $file != \#* ]] || continue
    [[ $# == 0 || " $* " == *" $file "* ]] || continue
    read -ra words <<<"$command"
    # As it is before and after, since clocks change.
    measure as-they-are nothing "" "${words[@]}"
    for value in ${values//,/ }; do measure "$file-$constant-$value" "$constant of $file" "$value" "${words[@]}"; done
    measure as-they-are nothing "" "${words[@]}"
done <tune.txt
TUNE
chmod +x "$to/tune"
du -sh "$to"
