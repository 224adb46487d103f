// The emulated driver and the few calls of CUDA's runtime that src/device/cuda/ and the kernels
// use, under the names of libcuda.so.
//
// Work is done when it is queued. Events are therefore complete at once, but are not reported
// complete at once. GPU memory is process memory at addresses that are used only once. Any access
// to freed memory or past the end is therefore an illegal access. Copies and fills must stay within
// one allocation. Missing calls are missing symbols of the library, so that cudarc panics with
// their names.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda.h"
#include "machine.h"

namespace {

using namespace emulator;

constexpr int NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, NOT_SUPPORTED = 801;
constexpr int ALREADY_REGISTERED = 712, NOT_REGISTERED = 713;
// Address space reserved for GPU memory, and the memory of each GPU, in bytes.
constexpr size_t ADDRESSES = size_t(1) << 44, PAGE_BYTES = 64 << 10;
constexpr size_t MEMORY_BYTES = size_t(16) << 30;
constexpr int GARBAGE = 0xcd, GPUS_MAX = 16;

struct Gpu {
    size_t used = 0;
};

struct Piece {
    size_t bytes;
    Gpu* gpu;
};

// Streams keep the number of the last operation that the host waited for.
struct Stream {
    Gpu* gpu;
    std::atomic<std::uint64_t> waited_for{0};
};

struct Event {
    bool is_timed, is_recorded;
    std::chrono::steady_clock::time_point at;
    Stream* stream;
    std::uint64_t number;
    int queries;
};

// Number of queries for which an event is reported incomplete if no caller has waited for it.
constexpr int QUERIES = 8;

std::mutex lock;
Gpu gpus[GPUS_MAX];
std::atomic<bool> is_initialized{false};
// The current context of this thread. Each GPU has one context, so it is the GPU.
__thread Gpu* current = nullptr;

char *addresses = nullptr, *next_address = nullptr;
std::atomic<std::uint64_t> done{0}, waited_for{0};
std::map<char*, Piece> pieces;
std::map<char*, size_t> registered;
std::unordered_set<void*> host_pieces, streams, events;

// Fills every byte of a GPU's UUID with the number of the GPU.
std::string uuid_text(int gpu) {
    char byte[3];
    std::snprintf(byte, sizeof byte, "%02x", gpu);
    std::string text = "GPU-";
    for (const int bytes : {4, 2, 2, 2, 6}) {
        for (int at = 0; at < bytes; ++at) text += byte;
        text += '-';
    }
    text.pop_back();
    return text;
}

// Returns the GPUs that CUDA_VISIBLE_DEVICES shows, in its order: numbers, or UUIDs that may be cut
// short. As with CUDA, the first entry that names no GPU ends the list.
std::vector<int> shown_gpus() {
    const char* asked = std::getenv("DOVETAIL_EMULATED_GPUS");
    const int all = std::min(std::max(asked ? std::atoi(asked) : 1, 0), GPUS_MAX);
    std::vector<int> shown;
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int gpu = 0; gpu < all; ++gpu) shown.push_back(gpu);
        return shown;
    }
    std::istringstream entries(visible);
    for (std::string entry; std::getline(entries, entry, ',');) {
        int found = -1;
        for (int gpu = 0; gpu < all; ++gpu) {
            const bool is_uuid = entry.size() > 4 && uuid_text(gpu).compare(0, entry.size(), entry) == 0;
            if (is_uuid || entry == std::to_string(gpu)) found = gpu;
        }
        if (found < 0) break;
        shown.push_back(found);
    }
    return shown;
}

int gpu_count() { return int(shown_gpus().size()); }

// Checks that almost every call begins with. Returns an error code.
int ready() {
    if (!is_initialized) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    return lasting_error();
}

// Returns the allocation that contains an address. The caller holds the lock.
std::map<char*, Piece>::iterator piece_around(const void* address) {
    auto after = pieces.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    if (after == pieces.begin()) return pieces.end();
    --after;
    return static_cast<const char*>(address) < after->first + after->second.bytes ? after : pieces.end();
}

// True if `bytes` bytes at `address` are within one allocation of GPU memory. Prints an error
// otherwise.
bool is_memory(const void* address, size_t bytes, const char* what) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto piece = piece_around(address);
    const bool is_there = piece != pieces.end() && bytes <= size_t(piece->first + piece->second.bytes - static_cast<const char*>(address));
    if (!is_there) std::fprintf(stderr, "emulated GPU: %s of %zu bytes at %p, which is no memory of the GPU\n", what, bytes, address);
    return is_there;
}

int copy(void* to, const void* from, size_t bytes, const void* of_gpu, const void* also_of_gpu) {
    if (const int code = ready()) return code;
    for (const void* address : {of_gpu, also_of_gpu})
        if (address && !is_memory(address, bytes, "a copy")) return INVALID_VALUE;
    std::memmove(to, from, bytes);
    return SUCCESS;
}

int fill(void* to, int byte, size_t bytes) {
    if (const int code = ready()) return code;
    if (!is_memory(to, bytes, "a fill")) return INVALID_VALUE;
    std::memset(to, byte, bytes);
    return SUCCESS;
}

int attribute_of(int attribute, int* value) {
    switch (attribute) {
        case 1: *value = THREADS_MAX; return SUCCESS;
        case 8: *value = SHARED_BYTES_UNASKED; return SUCCESS;
        case 10: *value = 32; return SUCCESS;
        case 16: *value = MULTIPROCESSORS; return SUCCESS;
        // L2 cache bytes: few, so that tests have arrays that do not fit.
        case 38: *value = 1 << 20; return SUCCESS;
        case 75: *value = 9; return SUCCESS;
        case 76: *value = 0; return SUCCESS;
        case 97: *value = SHARED_BYTES_MAX; return SUCCESS;
        // Memory pools; stream waits on 64-bit words.
        case 115: case 122: *value = 1; return SUCCESS;
        default: return NOT_SUPPORTED;
    }
}

template <typename T>
bool is_known(const std::unordered_set<void*>& all, T* handle) {
    const std::lock_guard<std::mutex> guard(lock);
    return all.count(handle) > 0;
}

// True if work may be queued on the stream: it is one of the current context.
bool is_stream(void* stream) {
    if (!stream) return true;
    const std::lock_guard<std::mutex> guard(lock);
    return streams.count(stream) > 0 && static_cast<Stream*>(stream)->gpu == current;
}

}  // namespace

const char* emulator::describe(const void* address) {
    static __thread char text[100];
    const char* at = static_cast<const char*>(address);
    const bool is_of_gpu = addresses && at >= addresses && at < addresses + ADDRESSES;
    std::snprintf(text, sizeof(text), "%p is %s", address, is_of_gpu ? "memory of the GPU that was freed, or lies between pieces" : "no memory of the GPU");
    return text;
}

cudaError_t cudaGetDevice(int* device) {
    *device = current ? int(current - gpus) : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) { return cudaError_t(attribute_of(attribute, value)); }

cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) { return cudaError_t(fill(to, byte, bytes)); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return cudaError_t(copy(to, from, bytes, to, from));
}

extern "C" {

int cuInit(unsigned) {
    // CUDA_ERROR_NO_DEVICE.
    if (gpu_count() == 0) return 100;
    const std::lock_guard<std::mutex> guard(lock);
    if (is_initialized) return SUCCESS;
    void* reserved = mmap(nullptr, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return OUT_OF_MEMORY;
    addresses = next_address = static_cast<char*>(reserved);
    is_initialized = true;
    std::fprintf(stderr, "emulated GPU: kernels run on the CPU, for tests; there is no GPU in this build\n");
    return SUCCESS;
}

int cuDeviceGetCount(int* count) {
    *count = gpu_count();
    return is_initialized ? SUCCESS : NOT_INITIALIZED;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < gpu_count() ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, size_t(bytes), "emulated GPU (kernels run on the CPU)");
    return SUCCESS;
}

int cuDeviceGetUuid_v2(void* uuid, int device) {
    if (device < 0 || device >= gpu_count()) return INVALID_DEVICE;
    std::memset(uuid, shown_gpus()[size_t(device)], 16);
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) { return attribute_of(attribute, value); }

int cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = MEMORY_BYTES;
    return SUCCESS;
}

int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
    if (device < 0 || device >= gpu_count()) return INVALID_DEVICE;
    std::snprintf(text, size_t(bytes), "0000:%02x:00.0", shown_gpus()[size_t(device)] + 1);
    return SUCCESS;
}

// Access goes through exported memory, which needs none of this.
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer;
    return device < gpu_count() && peer < gpu_count() ? SUCCESS : INVALID_DEVICE;
}

// The handle of a memory pool is its GPU.
int cuDeviceGetDefaultMemPool(void** pool, int device) {
    if (device < 0 || device >= gpu_count()) return INVALID_DEVICE;
    *pool = &gpus[device];
    return SUCCESS;
}

// Accepts only the release threshold. Freed memory is never kept.
int cuMemPoolSetAttribute(void*, int attribute, void*) { return attribute == 4 ? SUCCESS : NOT_SUPPORTED; }

int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (device < 0 || device >= gpu_count()) return INVALID_DEVICE;
    *context = &gpus[device];
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

int cuCtxGetCurrent(void** context) {
    *context = current;
    return SUCCESS;
}

int cuCtxSetCurrent(void* context) {
    current = static_cast<Gpu*>(context);
    return SUCCESS;
}

int cuCtxSynchronize() {
    waited_for = ++done;
    return ready();
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    if (const int code = ready()) return code;
    const std::lock_guard<std::mutex> guard(lock);
    *total = MEMORY_BYTES;
    *free = MEMORY_BYTES - current->used;
    return SUCCESS;
}

int cuMemAllocAsync(void** pointer, size_t bytes, void* stream) {
    if (const int code = ready()) return code;
    if (!is_stream(stream)) return INVALID_HANDLE;
    if (bytes == 0) return INVALID_VALUE;
    const size_t pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    char* start;
    {
        const std::lock_guard<std::mutex> guard(lock);
        const size_t left = size_t(addresses + ADDRESSES - next_address);
        if (bytes > MEMORY_BYTES - current->used || pages + PAGE_BYTES > left) return OUT_OF_MEMORY;
        if (mprotect(next_address, pages, PROT_READ | PROT_WRITE) != 0) return OUT_OF_MEMORY;
        // An allocation ends at the end of its last page, rounded to 256 bytes. It begins at a
        // multiple of 256 bytes, as the driver's do. An unmapped page separates two allocations.
        start = next_address + (pages - (bytes + 255) / 256 * 256);
        next_address += pages + PAGE_BYTES;
        pieces[start] = {bytes, current};
        current->used += bytes;
    }
    std::memset(start, GARBAGE, bytes);
    *pointer = start;
    return SUCCESS;
}

int cuMemFreeAsync(void* pointer, void* stream) {
    if (const int code = ready()) return code;
    if (!is_stream(stream)) return INVALID_HANDLE;
    const std::lock_guard<std::mutex> guard(lock);
    const auto piece = pieces.find(static_cast<char*>(pointer));
    if (piece == pieces.end()) return INVALID_VALUE;
    char* first = piece->first - reinterpret_cast<std::uintptr_t>(piece->first) % PAGE_BYTES;
    const size_t bytes = size_t(piece->first + (piece->second.bytes + 255) / 256 * 256 - first);
    piece->second.gpu->used -= piece->second.bytes;
    pieces.erase(piece);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(first, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

// Memory that other processes can map: a file.

int cuMemGetAllocationGranularity(size_t* granule, const void*, int) {
    if (const int code = ready()) return code;
    *granule = PAGE_BYTES;
    return SUCCESS;
}

int cuMemCreate(unsigned long long* handle, size_t bytes, const void*, unsigned long long) {
    if (const int code = ready()) return code;
    if (bytes == 0 || bytes % PAGE_BYTES != 0) return INVALID_VALUE;
    const int file = memfd_create("emulated-window", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(bytes)) != 0) return OUT_OF_MEMORY;
    *handle = static_cast<unsigned long long>(file);
    return SUCCESS;
}

int cuMemExportToShareableHandle(void* to, unsigned long long handle, unsigned, unsigned long long) {
    if (const int code = ready()) return code;
    const int file = fcntl(int(handle), F_DUPFD_CLOEXEC, 0);
    if (file < 0) return INVALID_HANDLE;
    *static_cast<int*>(to) = file;
    return SUCCESS;
}

int cuMemImportFromShareableHandle(unsigned long long* handle, void* from, unsigned) {
    if (const int code = ready()) return code;
    const int file = fcntl(int(reinterpret_cast<std::intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
    if (file < 0) return INVALID_HANDLE;
    *handle = static_cast<unsigned long long>(file);
    return SUCCESS;
}

int cuMemRelease(unsigned long long handle) {
    return close(int(handle)) == 0 ? SUCCESS : INVALID_HANDLE;
}

int cuMemAddressReserve(void** pointer, size_t bytes, size_t, void*, unsigned long long) {
    if (const int code = ready()) return code;
    if (bytes == 0 || bytes % PAGE_BYTES != 0) return INVALID_VALUE;
    const std::lock_guard<std::mutex> guard(lock);
    if (bytes + PAGE_BYTES > size_t(addresses + ADDRESSES - next_address)) return OUT_OF_MEMORY;
    *pointer = next_address;
    next_address += bytes + PAGE_BYTES;
    return SUCCESS;
}

int cuMemAddressFree(void*, size_t) { return SUCCESS; }

// Memory is readable and writable once access is set.
int cuMemMap(void* pointer, size_t bytes, size_t offset, unsigned long long handle, unsigned long long) {
    if (const int code = ready()) return code;
    struct stat found;
    if (fstat(int(handle), &found) != 0 || size_t(found.st_size) < offset + bytes) return INVALID_VALUE;
    const int flags = MAP_SHARED | MAP_FIXED;
    return mmap(pointer, bytes, PROT_NONE, flags, int(handle), off_t(offset)) == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

int cuMemSetAccess(void* pointer, size_t bytes, const void*, size_t) {
    if (const int code = ready()) return code;
    if (mprotect(pointer, bytes, PROT_READ | PROT_WRITE) != 0) return INVALID_VALUE;
    const std::lock_guard<std::mutex> guard(lock);
    pieces[static_cast<char*>(pointer)] = {bytes, current};
    return SUCCESS;
}

int cuMemUnmap(void* pointer, size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock);
    pieces.erase(static_cast<char*>(pointer));
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap(pointer, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
    if (const int code = ready()) return code;
    void* memory = std::aligned_alloc(PAGE_BYTES, (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    if (!memory) return OUT_OF_MEMORY;
    std::memset(memory, GARBAGE, bytes);
    const std::lock_guard<std::mutex> guard(lock);
    host_pieces.insert(memory);
    *pointer = memory;
    return SUCCESS;
}

int cuMemFreeHost(void* pointer) {
    const std::lock_guard<std::mutex> guard(lock);
    if (host_pieces.erase(pointer) == 0) return INVALID_VALUE;
    std::free(pointer);
    return SUCCESS;
}

int cuMemHostRegister_v2(void* start, size_t bytes, unsigned) {
    if (const int code = ready()) return code;
    if (bytes == 0) return INVALID_VALUE;
    const std::lock_guard<std::mutex> guard(lock);
    char* first = static_cast<char*>(start);
    const auto after = registered.lower_bound(first + bytes);
    if (after != registered.begin() && std::prev(after)->first + std::prev(after)->second > first) return ALREADY_REGISTERED;
    registered[first] = bytes;
    return SUCCESS;
}

int cuMemHostUnregister(void* start) {
    const std::lock_guard<std::mutex> guard(lock);
    return registered.erase(static_cast<char*>(start)) == 0 ? NOT_REGISTERED : SUCCESS;
}

int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
    return is_stream(stream) ? copy(to, from, bytes, to, nullptr) : INVALID_HANDLE;
}

int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
    return is_stream(stream) ? copy(to, from, bytes, from, nullptr) : INVALID_HANDLE;
}

int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
    return is_stream(stream) ? copy(to, from, bytes, to, from) : INVALID_HANDLE;
}

int cuMemsetD8Async(void* to, unsigned char byte, size_t bytes, void* stream) {
    return is_stream(stream) ? fill(to, byte, bytes) : INVALID_HANDLE;
}

int cuStreamCreate(void** stream, unsigned) {
    if (const int code = ready()) return code;
    const std::lock_guard<std::mutex> guard(lock);
    *stream = new Stream{current};
    streams.insert(*stream);
    return SUCCESS;
}

int cuStreamDestroy_v2(void* stream) {
    const std::lock_guard<std::mutex> guard(lock);
    if (streams.erase(stream) == 0) return INVALID_HANDLE;
    delete static_cast<Stream*>(stream);
    return SUCCESS;
}

int cuStreamSynchronize(void* stream) {
    if (!is_stream(stream)) return INVALID_HANDLE;
    if (stream) static_cast<Stream*>(stream)->waited_for = ++done;
    return ready();
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    return is_stream(stream) && is_known(events, event) ? ready() : INVALID_HANDLE;
}

int cuEventCreate(void** event, unsigned flags) {
    if (const int code = ready()) return code;
    constexpr unsigned DISABLE_TIMING = 2;
    const std::lock_guard<std::mutex> guard(lock);
    *event = new Event{(flags & DISABLE_TIMING) == 0, false, {}, nullptr, 0, 0};
    events.insert(*event);
    return SUCCESS;
}

int cuEventDestroy_v2(void* event) {
    const std::lock_guard<std::mutex> guard(lock);
    if (events.erase(event) == 0) return INVALID_HANDLE;
    delete static_cast<Event*>(event);
    return SUCCESS;
}

int cuEventRecord(void* event, void* stream) {
    if (const int code = ready()) return code;
    if (!is_stream(stream) || !is_known(events, event)) return INVALID_HANDLE;
    Event& own = *static_cast<Event*>(event);
    own = {own.is_timed, true, std::chrono::steady_clock::now(), static_cast<Stream*>(stream), ++done, 0};
    return SUCCESS;
}

// All earlier work is done. The event is still reported incomplete for some queries, so that
// callers exercise their waits.
int cuEventQuery(void* event) {
    if (!is_known(events, event)) return INVALID_HANDLE;
    if (const int code = ready()) return code;
    Event& own = *static_cast<Event*>(event);
    const bool is_waited_for = waited_for > own.number || (is_known(streams, own.stream) && own.stream->waited_for > own.number);
    return !own.is_recorded || is_waited_for || ++own.queries > QUERIES ? SUCCESS : NOT_READY;
}

int cuEventSynchronize(void* event) {
    if (!is_known(events, event)) return INVALID_HANDLE;
    static_cast<Event*>(event)->queries = QUERIES;
    return ready();
}

int cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    if (const int code = ready()) return code;
    if (!is_known(events, start) || !is_known(events, end)) return INVALID_HANDLE;
    const Event &first = *static_cast<Event*>(start), &last = *static_cast<Event*>(end);
    if (!first.is_timed || !last.is_timed || !first.is_recorded || !last.is_recorded) return INVALID_HANDLE;
    // At least the resolution of the driver's timer.
    *milliseconds = std::max(std::chrono::duration<float, std::milli>(last.at - first.at).count(), 0.0005f);
    return SUCCESS;
}

int cuGetErrorName(int code, const char** name) {
    static __thread char text[40];
    std::snprintf(text, sizeof(text), "CUDA error %d", code);
    *name = text;
    return SUCCESS;
}

int cuGetErrorString(int code, const char** words) { return cuGetErrorName(code, words); }

}  // extern "C"
