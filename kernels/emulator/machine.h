// What the emulated driver and the emulated processors know of each other.

#pragma once

namespace emulator {

// Codes of the driver, and of the runtime, which has the same ones.
constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719;

// Of each emulated GPU: as an H100 has them, but for the multiprocessors.
constexpr int MULTIPROCESSORS = 4, SHARED_BYTES_MAX = 227 << 10, SHARED_BYTES_UNASKED = 48 << 10, THREADS_MAX = 1024;

// What the first kernel that failed has left to every later call of the process; 0 as long as none has.
int lasting_error();

// What an address is among those of the GPU's memory, in words.
const char* describe(const void* address);

}  // namespace emulator
