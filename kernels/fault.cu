// A deliberate illegal access, for tests of the loss of a GPU. See src/device/cuda/fault.rs.

#include "common.cuh"

namespace dovetail {
namespace {

// Writes to an unmapped address. It is an argument, so that the compiler does not know it.
__global__ void write_to(std::uintptr_t address) { *reinterpret_cast<volatile u32*>(address) = 1; }

}  // namespace
}  // namespace dovetail

int dovetail_illegal_access(const DovetailIllegalAccess* args, DovetailStream stream) {
    dovetail::write_to<<<1, 1, 0, cudaStream_t(stream)>>>(std::uintptr_t(args->address));
    return dovetail::launched();
}
