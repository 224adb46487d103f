// Gathers values and validity at positions, and concatenates lists of positions.

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

template <typename Cell>
__global__ void gather(DovetailGather args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.places) return;
    if (at >= args.rows) {
        static_cast<Cell*>(args.out)[at] = Cell{};
        return;
    }
    const u32 position = position_at(args.positions, args.start, at);
    Cell value;
    if (position == NO_ROW) {
        u8* bytes = reinterpret_cast<u8*>(&value);
        for (u32 byte = 0; byte < sizeof(Cell); ++byte) bytes[byte] = args.missing;
    } else {
        value = static_cast<const Cell*>(args.data)[position];
    }
    static_cast<Cell*>(args.out)[at] = value;
}

__global__ void gather_numbers(DovetailGather args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.rows) return;
    const u32 position = position_at(args.positions, args.start, at);
    static_cast<u32*>(args.out)[at] = position == NO_ROW ? 0x01010101u * args.missing : args.data_start + position;
}

// Each thread gathers one bit. Each warp combines its bits into a word.
__global__ void gather_bits(DovetailGatherBits args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    bool valid = false;
    if (at < args.rows) {
        const u32 position = position_at(args.positions, args.start, at);
        valid = position != NO_ROW && is_valid(args.bits, position);
    }
    const u32 word = __ballot_sync(0xffffffffu, valid);
    const u32 present = __ballot_sync(0xffffffffu, at < args.rows);
    if (threadIdx.x % 32 == 0 && present) {
        args.out[at / 32] = word;
        const u32 cleared = __popc(present & ~word);
        if (cleared) atomicAdd(reinterpret_cast<u64*>(args.cleared), u64(cleared));
    }
}

// Each row of blocks (`blockIdx.y`) copies one list. A copy within GPU memory for each list would
// take as long as a kernel for each list.
__global__ void concat(const __grid_constant__ DovetailConcat args) {
    const DovetailList list = args.lists[blockIdx.y];
    u32* to = args.to + list.start;
    for (u64 at = u64(blockIdx.x) * THREADS + threadIdx.x; at < list.count; at += u64(gridDim.x) * THREADS) to[at] = list.from[at];
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_gather(const DovetailGather* args, DovetailStream stream) {
    const u32 blocks = blocks_for(args->places, THREADS);
    if (!args->data) {
        gather_numbers<<<blocks, THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    }
    return with_cell(args->width, [&](auto cell) {
        gather<decltype(cell)><<<blocks, THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}

int dovetail_gather_bits(const DovetailGatherBits* args, DovetailStream stream) {
    gather_bits<<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}

int dovetail_concat(const DovetailConcat* args, DovetailStream stream) {
    if (args->list_count == 0) return 0;
    u64 longest = 0;
    for (u32 list = 0; list < args->list_count; ++list) longest = longest > args->lists[list].count ? longest : args->lists[list].count;
    // Four numbers per thread, or more for long lists: BLOCKS_MAX blocks keep the GPU busy.
    constexpr u32 BLOCKS_MAX = 1024;
    const u32 blocks = blocks_for(longest, THREADS * 4);
    const dim3 grid(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX, args->list_count);
    concat<<<grid, THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
