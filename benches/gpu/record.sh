# Sourced by what runs benchmarks on a GPU.
#
#   record BENCHMARK COMMAND    JSON lines from its input, each with date, commit, machine and command
#
# DOVETAIL_COMMIT is the commit where there is no repository.
record() {
    local commit gpu line
    commit=${DOVETAIL_COMMIT:-$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
    gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1) || gpu=
    while read -r line; do
        printf '{"benchmark":"%s","date":"%s","commit":"%s","machine":"%s","command":"%s",%s\n' \
            "$1" "$(date -u +%FT%TZ)" "$commit" "${gpu:-no GPU}" "$2" "${line#\{}"
    done
}
