// NVTX ranges that name the work a thread queues. Profilers show them next to the GPU's work
// (Nsight Systems) or select kernels by them (ncu --nvtx). Without a profiler, a range costs a call
// through a pointer. See src/device/cuda/observe.rs.

#include <nvtx3/nvToolsExt.h>

#include "common.cuh"

void dovetail_range_begin(const char* name) { nvtxRangePushA(name); }

void dovetail_range_end() { nvtxRangePop(); }
