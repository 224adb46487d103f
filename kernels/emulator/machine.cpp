// The emulated processors. Blocks run one after the other. Each thread of a block is a fiber that
// runs until it waits for others.
//
// Each lane of a warp runs until it ends or waits. Lanes that wait for a warp operation continue
// when all lanes of its mask wait for the same one. The threads of a block continue when all wait
// at a barrier of one kind. If no thread can continue, the kernel is wrong: the launch ends with an
// error that names the waiting threads. A signal handler does the same for an illegal access.

#include "machine.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "cuda.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

// Switches to the context `to` and stores the current context in `*from`. Callee-saved registers
// are on the stack.
extern "C" void emulator_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
    .text
    .globl emulator_switch
    .hidden emulator_switch
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch, .-emulator_switch
)");
// Callee-saved registers, the entry address, and a return address, which is null.
constexpr size_t FRAME_WORDS = 8, FRAME_RETURN = 6;
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl emulator_switch
    .hidden emulator_switch
    .type emulator_switch, %function
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emulator_switch, .-emulator_switch
)");
constexpr size_t FRAME_WORDS = 20, FRAME_RETURN = 11;
#else
#error "fibers of this processor are not known"
#endif

namespace emulator {
namespace {

// The build refuses functions with frames of more than a quarter of a stack, and no function is
// recursive.
constexpr size_t STACK_BYTES = 128 << 10, PAGE_BYTES = 64 << 10;
// Bytes mapped for shared memory: whole pages, so that it ends with one.
constexpr size_t SHARED_ROOM = (SHARED_BYTES_MAX + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
constexpr unsigned WARP = 32;
constexpr int GARBAGE = 0xcd;

enum class State : std::uint8_t { READY, IN_WARP, AT_BARRIER, ENDED };

// Maps `bytes` bytes between two inaccessible guard pages.
char* map_guarded(size_t bytes) {
    char* start = static_cast<char*>(mmap(nullptr, bytes + 2 * PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (start == MAP_FAILED || mprotect(start + PAGE_BYTES, bytes, PROT_READ | PROT_WRITE) != 0) {
        std::fprintf(stderr, "emulated GPU: the system has no memory for its stacks\n");
        std::abort();
    }
    return start + PAGE_BYTES;
}

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

// Fibers are small, because a block has a thousand and scans them often.
struct Fiber {
    // The saved stack pointer. Null: not begun.
    void* at;
    char* stack;
    // The operation that the fiber waits for. `value` is its operand, then its result.
    std::uint64_t value;
    unsigned mask;
    std::uint8_t source_lane;
    State state;
    WarpOp op;
    Barrier barrier;
    bool predicate;
};

// State of a host thread that runs blocks.
struct Processor {
    std::vector<Fiber> fibers{size_t(THREADS_MAX)};
    // Pending asynchronous copies of each fiber, and their total number.
    std::vector<std::vector<Copy>> copies{size_t(THREADS_MAX)};
    size_t copy_count = 0;
    char* all_stacks = map_guarded(THREADS_MAX * STACK_BYTES);
    // Free stacks. The last one is used next, because it is in the cache.
    std::vector<char*> stacks;
    // Shared memory. A guard page follows it.
    char* shared = map_guarded(SHARED_ROOM);
    std::vector<void*> begun;
    // Launches so far. Every other launch, and every other block, runs its threads backwards.
    unsigned launches = 0;

    // The current launch.
    const char* name;
    void (*thread)(const void*);
    const void* arguments;
    uint3 block;
    unsigned threads;
    size_t shared_bytes;
    unsigned barrier_count;
    void* scheduler;
    // The running fiber. Null outside fibers.
    Fiber* current = nullptr;
    bool is_failed;

    Processor() {
        for (int stack = 0; stack < THREADS_MAX; ++stack) stacks.push_back(all_stacks + stack * STACK_BYTES);
    }

    ~Processor() {
        munmap(all_stacks - PAGE_BYTES, THREADS_MAX * STACK_BYTES + 2 * PAGE_BYTES);
        munmap(shared - PAGE_BYTES, SHARED_ROOM + 2 * PAGE_BYTES);
    }

    unsigned number(const Fiber& fiber) const { return unsigned(&fiber - fibers.data()); }

    void say(const Fiber& fiber, const char* what) const {
        std::fprintf(stderr, "emulated GPU: %s, block (%u, %u), thread %u: %s\n", name, blockIdx.x, blockIdx.y, number(fiber), what);
    }
};

// The signal handler must read `processor` without a call that may allocate.
__thread Processor* processor = nullptr;
// Deletes the processor when its thread ends.
thread_local struct Owner {
    ~Owner() {
        Processor* own = processor;
        processor = nullptr;
        delete own;
    }
} owner;

std::mutex lock;
int lasting = 0;
__thread int last_error = 0;
// Dynamic shared memory limit in bytes of each kernel that has requested one.
std::unordered_map<const void*, size_t> shared_limits;

void lose(int code) {
    const std::lock_guard<std::mutex> guard(lock);
    if (lasting == 0) lasting = code;
}

// Leaves the running fiber for good.
[[noreturn]] void leave_failed() {
    Processor& own = *processor;
    own.is_failed = true;
    void* nowhere;
    emulator_switch(&nowhere, own.scheduler);
    std::abort();
}

struct sigaction handlers_before[65];

const char* words_for(int signal) {
    switch (signal) {
        case SIGILL: return "an index out of bounds, a misaligned address or another operation without a meaning";
        case SIGFPE: return "a division by zero";
        default: return "an illegal access";
    }
}

// Returns the address of the interrupted instruction, for addr2line.
std::uintptr_t instruction_of(const void* context) {
#if defined(__x86_64__)
    return std::uintptr_t(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#else
    return std::uintptr_t(static_cast<const ucontext_t*>(context)->uc_mcontext.pc);
#endif
}

void on_signal(int signal, siginfo_t* info, void* context) {
    Processor* own = processor;
    if (!own || !own->current) {
        const struct sigaction& before = handlers_before[signal];
        if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
        if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
        // The process ends when the instruction is retried.
        sigaction(signal, &before, nullptr);
        return;
    }
    // A fiber cannot hold a lock that this code needs: kernels allocate nothing and write no files.
    const std::uintptr_t instruction = instruction_of(context);
    Dl_info library{};
    dladdr(reinterpret_cast<void*>(instruction), &library);
    char text[600];
    std::snprintf(text, sizeof(text), "%s: %s (addr2line -Cife %s %#zx)", words_for(signal),
                  signal == SIGSEGV || signal == SIGBUS ? describe(info->si_addr) : "trapped",
                  library.dli_fname ? library.dli_fname : "?", size_t(instruction - std::uintptr_t(library.dli_fbase)));
    own->say(*own->current, text);
    lose(ILLEGAL_ADDRESS);
    leave_failed();
}

void install_handlers() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) {
            struct sigaction action {};
            action.sa_sigaction = on_signal;
            // The handler is left by a switch, so its signal must stay unblocked.
            action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
            sigaction(signal, &action, &handlers_before[signal]);
        }
    });
}

Processor& own_processor() {
    if (!processor) {
        install_handlers();
        (void)&owner;
        processor = new Processor;
    }
    return *processor;
}

// Switches from the running fiber to the scheduler.
void wait() {
    Processor& own = *processor;
    emulator_switch(&own.current->at, own.scheduler);
}

void run_fiber() {
    Processor& own = *processor;
    own.thread(own.arguments);
    own.current->state = State::ENDED;
    wait();
    std::abort();
}

void begin(Processor& own, Fiber& fiber) {
    if (!fiber.stack) {
        fiber.stack = own.stacks.back();
        own.stacks.pop_back();
    }
    // Stacks begin at different page offsets. Otherwise they would all share the same cache lines.
    const size_t color = own.number(fiber) * 7 % 61 * 64;
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - color) - FRAME_WORDS;
    for (size_t word = 0; word < FRAME_WORDS; ++word) top[word] = nullptr;
    top[FRAME_RETURN] = reinterpret_cast<void*>(run_fiber);
    fiber.at = top;
}

// Runs a fiber until it waits or ends.
void resume(Processor& own, Fiber& fiber) {
    if (!fiber.at) begin(own, fiber);
    const unsigned number = own.number(fiber);
    threadIdx = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
    own.current = &fiber;
    emulator_switch(&own.scheduler, fiber.at);
    own.current = nullptr;
    if (fiber.state == State::ENDED) {
        if (own.copy_count > 0 && !own.copies[number].empty()) {
            own.say(fiber, "ended before its asynchronous copies had");
            own.is_failed = true;
        }
        own.stacks.push_back(fiber.stack);
        fiber.stack = nullptr;
    }
}

void complete(Processor& own, Fiber* lanes, unsigned mask) {
    const WarpOp op = lanes[__builtin_ctz(mask)].op;
    const auto for_each = [&](const auto& body) {
        for (unsigned left = mask; left != 0; left &= left - 1) body(unsigned(__builtin_ctz(left)));
    };
    std::uint64_t results[WARP], all = op == WarpOp::BALLOT || op == WarpOp::ANY ? 0 : lanes[__builtin_ctz(mask)].value;
    if (op == WarpOp::ADD) all = 0;
    for_each([&](unsigned lane) {
        const std::uint64_t value = lanes[lane].value;
        switch (op) {
            case WarpOp::SHUFFLE:
                if (!(mask >> lanes[lane].source_lane & 1)) {
                    own.say(lanes[lane], "a shuffle from a lane that the mask does not name");
                    own.is_failed = true;
                }
                results[lane] = lanes[lane].source_lane < WARP ? lanes[lanes[lane].source_lane].value : 0;
                break;
            case WarpOp::MATCH_ANY:
                results[lane] = 0;
                for_each([&](unsigned other) { results[lane] |= std::uint64_t(lanes[other].value == value) << other; });
                break;
            case WarpOp::BALLOT: all |= value << lane; break;
            case WarpOp::ANY: all |= value; break;
            // 32-bit operands: the caller truncates the sum.
            case WarpOp::ADD: all += value; break;
            case WarpOp::MAX: all = max(all, value); break;
        }
    });
    const bool is_of_lane = op == WarpOp::SHUFFLE || op == WarpOp::MATCH_ANY;
    for_each([&](unsigned lane) {
        lanes[lane].value = is_of_lane ? results[lane] : all;
        lanes[lane].state = State::READY;
    });
}

// True if all lanes of the lane's mask wait for the same operation.
bool is_complete(const Fiber* lanes, unsigned lane, unsigned lane_count) {
    const Fiber& own = lanes[lane];
    for (unsigned left = own.mask; left != 0; left &= left - 1) {
        const unsigned at = unsigned(__builtin_ctz(left));
        if (at >= lane_count) return false;
        const Fiber& other = lanes[at];
        if (other.state != State::IN_WARP || other.op != own.op || other.mask != own.mask) return false;
    }
    return true;
}

// Runs a warp until all of its lanes have ended or wait at a barrier.
void run_warp(Processor& own, unsigned first, bool backwards) {
    Fiber* lanes = &own.fibers[first];
    const unsigned count = min(WARP, own.threads - first);
    for (;;) {
        for (unsigned at = 0; at < count; ++at) {
            Fiber& fiber = lanes[backwards ? count - 1 - at : at];
            if (fiber.state == State::READY) resume(own, fiber);
            if (own.is_failed) return;
        }
        bool is_ready = false;
        const Fiber* stuck = nullptr;
        for (unsigned lane = 0; lane < count; ++lane) {
            if (lanes[lane].state != State::IN_WARP) continue;
            if (is_complete(lanes, lane, count)) {
                complete(own, lanes, lanes[lane].mask);
                is_ready = true;
            } else {
                stuck = &lanes[lane];
            }
        }
        if (own.is_failed) return;
        if (is_ready) continue;
        if (!stuck) return;
        char text[200];
        unsigned waiting = 0;
        for (unsigned lane = 0; lane < count; ++lane) waiting |= unsigned(lanes[lane].state == State::IN_WARP) << lane;
        std::snprintf(text, sizeof(text), "an operation of the warp with mask %08x, which not all of these lanes come to; %08x wait",
                      stuck->mask, waiting);
        own.say(*stuck, text);
        own.is_failed = true;
        return;
    }
}

// Releases all threads of a block from a barrier if all have reached it. Returns true if threads
// are left to run.
bool pass_barrier(Processor& own) {
    const Fiber *waiting = nullptr, *other = nullptr;
    own.barrier_count = 0;
    for (unsigned at = 0; at < own.threads; ++at) {
        const Fiber& fiber = own.fibers[at];
        if (fiber.state == State::AT_BARRIER) waiting = &fiber;
    }
    if (!waiting) return false;
    for (unsigned at = 0; at < own.threads; ++at) {
        Fiber& fiber = own.fibers[at];
        if (fiber.state != State::AT_BARRIER || fiber.barrier != waiting->barrier) other = &fiber;
        own.barrier_count += fiber.predicate;
    }
    if (other) {
        own.say(*waiting, "waits at a barrier");
        own.say(*other, other->state == State::ENDED ? "has ended without coming to it" : "waits at a barrier of another kind");
        own.is_failed = true;
        return false;
    }
    for (unsigned at = 0; at < own.threads; ++at) own.fibers[at].state = State::READY;
    return true;
}

void run_block(Processor& own, bool backwards) {
    own.begun.clear();
    // Drops the copies of a failed launch.
    if (own.copy_count > 0)
        for (std::vector<Copy>& some : own.copies) some.clear();
    own.copy_count = 0;
    std::memset(own.shared + SHARED_ROOM - own.shared_bytes, GARBAGE, own.shared_bytes);
    for (unsigned at = 0; at < own.threads; ++at) {
        own.fibers[at].state = State::READY;
        own.fibers[at].at = nullptr;
    }
    const unsigned warps = (own.threads + WARP - 1) / WARP;
    do {
        for (unsigned at = 0; at < warps; ++at) {
            run_warp(own, WARP * (backwards ? warps - 1 - at : at), backwards);
            if (own.is_failed) return;
        }
    } while (pass_barrier(own));
}

int check_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes) {
    const std::uint64_t threads = std::uint64_t(block.x) * block.y * block.z;
    if (threads == 0 || threads > THREADS_MAX || grid.x == 0 || grid.y == 0 || grid.z == 0) return INVALID_CONFIGURATION;
    if (grid.x > 0x7fffffffu || grid.y > 0xffff || grid.z > 0xffff) return INVALID_CONFIGURATION;
    const std::lock_guard<std::mutex> guard(lock);
    const auto allowed = shared_limits.find(kernel);
    return shared_bytes > (allowed == shared_limits.end() ? SHARED_BYTES_UNASKED : allowed->second) ? INVALID_VALUE : SUCCESS;
}

}  // namespace

int lasting_error() {
    const std::lock_guard<std::mutex> guard(lock);
    return lasting;
}

unsigned wait_for_block(Barrier kind, bool predicate) {
    Processor& own = *processor;
    Fiber& fiber = *own.current;
    fiber.state = State::AT_BARRIER;
    fiber.barrier = kind;
    fiber.predicate = predicate;
    wait();
    return own.barrier_count;
}

std::uint64_t wait_for_warp(WarpOp op, unsigned mask, std::uint64_t value, unsigned source_lane) {
    Processor& own = *processor;
    Fiber& fiber = *own.current;
    if (!(mask >> own.number(fiber) % WARP & 1)) fail("an operation of the warp whose mask does not name this lane");
    fiber.state = State::IN_WARP;
    fiber.op = op;
    fiber.mask = mask;
    fiber.value = value;
    fiber.source_lane = std::uint8_t(source_lane);
    wait();
    return fiber.value;
}

void fail(const char* what) {
    processor->say(*processor->current, what);
    lose(LAUNCH_FAILED);
    leave_failed();
}

void* dynamic_shared() {
    return processor->shared + SHARED_ROOM - processor->shared_bytes;
}

void begin_shared(void* variable, size_t bytes) {
    std::vector<void*>& begun = processor->begun;
    for (void* known : begun)
        if (known == variable) return;
    begun.push_back(variable);
    std::memset(variable, GARBAGE, bytes);
}

void copy_later(void* to, const void* from, size_t bytes) {
    Processor& own = *processor;
    own.copies[own.number(*own.current)].push_back({to, from, bytes});
    ++own.copy_count;
}

void finish_copies() {
    Processor& own = *processor;
    std::vector<Copy>& copies = own.copies[own.number(*own.current)];
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    own.copy_count -= copies.size();
    copies.clear();
}

cudaError_t allow_dynamic_shared(const void* kernel, int bytes) {
    if (bytes < 0 || bytes > SHARED_BYTES_MAX) return cudaError_t(last_error = INVALID_VALUE);
    const std::lock_guard<std::mutex> guard(lock);
    shared_limits[kernel] = size_t(bytes);
    return cudaSuccess;
}

void run(const char* name, const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, void (*thread)(const void*),
         const void* arguments) {
    if (const int code = lasting_error()) {
        last_error = code;
        return;
    }
    if (const int code = check_launch(kernel, grid, block, shared_bytes)) {
        std::fprintf(stderr, "emulated GPU: %s: a launch of %u blocks of %u threads with %zu bytes of shared memory\n", name, grid.x,
                     block.x, shared_bytes);
        last_error = code;
        return;
    }
    Processor& own = own_processor();
    own.name = name;
    own.thread = thread;
    own.arguments = arguments;
    own.threads = block.x * block.y * block.z;
    // Aligned to 16 bytes, dynamic shared memory ends as close to the guard page as possible.
    own.shared_bytes = (shared_bytes + 15) / 16 * 16;
    own.is_failed = false;
    ++own.launches;
    blockDim = {block.x, block.y, block.z};
    gridDim = {grid.x, grid.y, grid.z};
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                run_block(own, (own.launches + x) % 2 == 0);
                if (!own.is_failed) continue;
                lose(LAUNCH_FAILED);
                last_error = lasting_error();
                return;
            }
}

}  // namespace emulator

cudaError_t cudaGetLastError() {
    const int code = emulator::last_error;
    // A lasting error is reported by every later call.
    emulator::last_error = emulator::lasting_error();
    return cudaError_t(code);
}
