// Shared declarations of the emulated driver and the emulated processors.

#pragma once

namespace emulator {

// Error codes, equal in driver and runtime.
constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719;

// Attributes of each emulated GPU: an H100's, except for the multiprocessors.
constexpr int MULTIPROCESSORS = 4, SHARED_BYTES_MAX = 227 << 10, SHARED_BYTES_UNASKED = 48 << 10, THREADS_MAX = 1024;

// Error of the first kernel that failed, reported by every later call of the process. 0 if none has
// failed.
int lasting_error();

// Describes an address relative to GPU memory.
const char* describe(const void* address);

}  // namespace emulator
