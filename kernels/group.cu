// Finds the first run of equal keys of each partition. The keys are grouped already: sort.cu has
// sorted them by their mixed keys, and select.cu has listed the runs.

#include "common.cuh"

namespace dovetail {
namespace {

__global__ void lower_bounds(DovetailLowerBounds args) {
    const u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= args.bound_count) return;
    const u32 bound = args.bounds[at];
    u64 low = 0, high = args.position_count;
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        if (args.positions[middle] < bound) low = middle + 1;
        else high = middle;
    }
    args.indices[at] = u32(low);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_lower_bounds(const DovetailLowerBounds* args, DovetailStream stream) {
    lower_bounds<<<blocks_for(args->bound_count, 256), 256, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
