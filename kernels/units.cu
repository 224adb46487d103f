// Lists the work units of the blocks that match or join partitions. A partition is one unit. A
// partition with far more probe rows than others is split into several, so that no block runs long
// after the others. (Rui and Tu 2017, section 4.2, split skewed partitions in this way.)
//
// A prefix sum adds up the units of the partitions. Then one thread per unit searches for its
// partition. The CPU would have to wait for the bounds (256 KB if rows are many) and then send the
// units.

#include <cub/device/device_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

auto units_of(const DovetailListUnits& args) {
    return thrust::transform_iterator(thrust::counting_iterator<u32>(0), PiecesOf{args.probe_bounds, args.partitions, args.whole_rows, args.unit_rows});
}

// Divides the scratch memory.
struct Scratch {
    // First unit of each partition, and the number of units at the end.
    u32* starts;
    void* scan;
    size_t scan_bytes = 0, bytes;
    // Error of the query for the scan's scratch bytes.
    cudaError_t error;

    Scratch(void* memory, u32 partitions) {
        Divider divider(memory);
        starts = divider.take<u32>(u64(partitions) + 1);
        DovetailListUnits args{};
        args.partitions = partitions;
        args.whole_rows = args.unit_rows = 1;
        error = cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, units_of(args), starts, std::int64_t(partitions) + 1);
        scan = divider.take<u8>(scan_bytes);
        bytes = divider.bytes();
    }
};

__global__ void list_units(const DovetailListUnits args, const u32* starts) {
    const u32 unit = blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= args.unit_count) return;
    if (unit >= starts[args.partitions]) {
        args.units[unit] = {0, 0, 0};
        return;
    }
    // Finds the last partition that starts at or before this unit. A partition without units starts
    // where the next one does.
    u32 low = 0, high = args.partitions;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (starts[middle] <= unit) low = middle;
        else high = middle;
    }
    const u32 start = args.probe_bounds[low] + (unit - starts[low]) * args.unit_rows, end = args.probe_bounds[low + 1];
    const bool is_last = unit + 1 == starts[low + 1];
    args.units[unit] = {low, start, is_last ? end : start + args.unit_rows};
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_list_units_scratch_bytes(uint32_t partitions) {
    const Scratch scratch(nullptr, partitions);
    return bytes_unless(scratch.error, scratch.bytes);
}

int dovetail_list_units(const DovetailListUnits* args, DovetailStream stream_handle) {
    const cudaStream_t stream = cudaStream_t(stream_handle);
    Scratch scratch(args->scratch, args->partitions);
    if (scratch.error != cudaSuccess) return answered(scratch.error);
    if (scratch.bytes > args->scratch_bytes || args->unit_rows == 0 || args->whole_rows < args->unit_rows) return int(cudaErrorInvalidValue);
    const cudaError_t error = cub::DeviceScan::ExclusiveSum(scratch.scan, scratch.scan_bytes, units_of(*args), scratch.starts,
                                                            std::int64_t(args->partitions) + 1, stream);
    if (error != cudaSuccess) return answered(error);
    list_units<<<blocks_for(args->unit_count, THREADS), THREADS, 0, stream>>>(*args, scratch.starts);
    return launched();
}
