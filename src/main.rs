//! The `dovetail` binary. Everything is in the library; see [`dovetail::cli`].

/// Bodies of messages come and go in buffers of megabytes. The system's allocator gives such memory back and takes it anew
/// each time, page by page; this one keeps it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    dovetail::cli::main()
}
