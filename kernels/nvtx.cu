// Names for what a thread queues, which profilers show beside the work of the GPU (Nsight Systems) or choose it by (ncu --nvtx).
// Without a profiler a range is a call through a pointer. See src/device/cuda/observe.rs.

#include <nvtx3/nvToolsExt.h>

#include "common.cuh"

void dovetail_range_begin(const char* name) { nvtxRangePushA(name); }

void dovetail_range_end() { nvtxRangePop(); }
