// Clusters of blocks, bulk copies and the barriers that tell of them, which compute capability 9.0 has. They are written as PTX, so that
// these programs need no headers but those that nvcc finds by itself.

#pragma once

#include "common.cuh"

#if __CUDA_ARCH__ >= 900
#define HAS_BULK_COPIES 1
#else
#define HAS_BULK_COPIES 0
#endif

// Multicast is of large chips and, as the assembler warns, for code that is made for these and no others.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || \
    (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__)))
#define HAS_MULTICAST 1
#else
#define HAS_MULTICAST 0
#endif

struct Features {
    bool bulk_copies, multicast;
};

// Of the code that runs on this GPU, which may have been compiled for an older one.
__global__ void features_kernel(Features* features) { *features = {bool(HAS_BULK_COPIES), bool(HAS_MULTICAST)}; }

static Features features_here() {
    auto* there = device_memory<Features>(1);
    features_kernel<<<1, 1>>>(there);
    CHECK(cudaGetLastError());
    Features features{};
    CHECK(cudaMemcpy(&features, there, sizeof(Features), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(there));
    return features;
}

// How a kernel is launched in clusters of `size` blocks, as many as the GPU runs at once.
struct ClusterLaunch {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    u32 size;

    ClusterLaunch(int processors, u32 size, u32 threads, size_t shared_bytes) : size(size) {
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = size;
        attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        config.gridDim = dim3(u32(processors) / size * size);
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    ClusterLaunch(const ClusterLaunch&) = delete;

    // Sets the grid; answers how many clusters run at once.
    template <typename Kernel>
    u32 fit(Kernel kernel) {
        int clusters = 0;
        CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        config.gridDim = dim3(u32(clusters) * size);
        return u32(clusters);
    }
};

#if HAS_BULK_COPIES

__device__ inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// What this thread has written to shared memory is seen by bulk copies, its own and, past a barrier, those of other threads.
__device__ inline void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void copy_out(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until no more than so many of this thread's copies, the last ones, have still to read shared memory.
template <int LEFT>
__device__ inline void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ inline void wait_until_copied() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ inline u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// For all threads of all blocks of a cluster; what they wrote before is seen after it.
__device__ inline void wait_for_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline void init_barrier(u64& barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Barriers that this thread has made are seen by the other blocks of the cluster and by copies, once they have waited for it.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and has the phase last until so many bytes have come.
__device__ inline void arrive_expecting(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// Where what this pointer is to lies in the shared memory of a block of the cluster.
__device__ inline u32 address_in(const void* pointer, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(pointer)), "r"(rank));
    return there;
}

__device__ inline void store_in(u32* to, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(to, rank)), "r"(value) : "memory");
}

__device__ inline void store_in(uint4* to, u32 rank, uint4 value) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address_in(to, rank)), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// Arrives at the barrier that is in this one's place in a block of the cluster.
__device__ inline void arrive_at(u64& barrier, u32 rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(&barrier, rank)) : "memory");
}

// What other threads of this block have stored in other blocks, before a barrier of the block, is seen by who waits for this arrival.
__device__ inline void arrive_for_all_at(u64& barrier, u32 rank) {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
    arrive_at(barrier, rank);
}

// Arrives there, and has the phase last until so many bytes have come.
__device__ inline void arrive_expecting_at(u64& barrier, u32 rank, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(address_in(&barrier, rank)),
                 "r"(bytes)
                 : "memory");
}

// Copies to the place of `to` in a block of the cluster, whose barrier is told. Bytes and both places are multiples of 16.
__device__ inline void copy_to(void* to, u32 rank, const void* from, u32 bytes, u64& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_in(to, rank)),
                 "r"(shared_address(from)), "r"(bytes), "r"(address_in(&barrier, rank))
                 : "memory");
}

__device__ inline bool has_passed(u64& barrier, u32 parity) {
    u32 passed;
    asm volatile("{\n"
                 ".reg .pred passed;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 passed, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, passed;\n"
                 "}"
                 : "=r"(passed)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
    return passed != 0;
}

// Waits for the end of the phase of that parity. One that never ends is an error, and must not hold the GPU.
__device__ inline void wait_for(u64& barrier, u32 parity) {
    u64 began = 0;
    while (!has_passed(barrier, parity)) {
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (began == 0) began = now;
        if (now - began > 20'000'000'000ull) __trap();
    }
}

__device__ inline void copy_in(void* to, const void* from, u32 bytes, u64& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

#if HAS_MULTICAST

// To the same place in all blocks of `mask`, and each of them is told by its own barrier.
__device__ inline void copy_in_to_all(void* to, const void* from, u32 bytes, u64& barrier, std::uint16_t mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
                 "%4;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&barrier)), "h"(mask)
                 : "memory");
}

#endif
#endif
