// A deliberate illegal access, for tests of what happens when a GPU is lost. See src/device/cuda/fault.rs.

#include "common.cuh"

namespace dovetail {
namespace {

// An address that is no memory, and that the compiler does not know.
__global__ void write_to(std::uintptr_t address) { *reinterpret_cast<volatile u32*>(address) = 1; }

}  // namespace
}  // namespace dovetail

int dovetail_illegal_access(const DovetailIllegalAccess* args, DovetailStream stream) {
    dovetail::write_to<<<1, 1, 0, cudaStream_t(stream)>>>(std::uintptr_t(args->address));
    return dovetail::launched();
}
