//! The `dovetail` binary. Everything is in the library; see [`dovetail::cli`].

/// Message bodies use short-lived buffers of megabytes. The system allocator returns such memory to
/// the kernel and faults it in again each time, page by page. jemalloc keeps freed memory for some
/// seconds, and a thread of its own then returns it, also in an idle server. mimalloc keeps twice
/// as much when many threads free the memory of others, and needs help to return it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    dovetail::cli::main()
}
