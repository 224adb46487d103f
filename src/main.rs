//! The `dovetail` binary. Everything is in the library; see [`dovetail::cli`].

/// Message bodies use short-lived buffers of megabytes. The system allocator returns such memory to
/// the kernel and faults it in again each time, page by page. mimalloc keeps the memory for a while
/// (`cli/heap.rs`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    dovetail::cli::main()
}
