//! The `dovetail` binary. Everything is in the library; see [`dovetail::cli`].

fn main() -> std::process::ExitCode {
    dovetail::cli::main()
}
