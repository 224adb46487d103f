//! Build script: compiles the protos in Rust (no protoc), and the kernels if an nvcc is available.
//! Flight's own proto is for reflection only. Records the commit for `--version`.

#[path = "kernels/build.rs"]
mod kernels;

use std::path::PathBuf;
use std::process::Command;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    // The sources decide whether the version has `-dirty`.
    println!("cargo::rerun-if-changed=src");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);

    let files = protox::compile(["proto/dovetail.proto"], ["proto"])?;
    let descriptor_set = files.encode_to_vec();
    std::fs::write(out.join("dovetail_descriptor.bin"), &descriptor_set)?;
    tonic_prost_build::configure()
        .compile_well_known_types(true)
        .extern_path(".google.protobuf", "::pbjson_types")
        .compile_fds(files)?;
    let flight = protox::compile(["proto/flight.proto"], ["proto"])?;
    std::fs::write(out.join("flight_descriptor.bin"), flight.encode_to_vec())?;
    pbjson_build::Builder::new().register_descriptors(&descriptor_set)?.build(&[".dovetail.v1"])?;

    // The version of a build with emulated kernels says so.
    let emulated = if kernels::build(&out)? == kernels::Kernels::Emulated { "-emulated-gpu" } else { "" };

    println!("cargo::rustc-env=DOVETAIL_COMMIT={}{emulated}", commit());
    Ok(())
}

/// Returns the commit of the build. Outside a checkout, it is in the environment variable
/// `DOVETAIL_REVISION`, or `unknown`. Adds `-dirty` if tracked files
/// outside `benches/results` differ from the commit.
fn commit() -> String {
    let git =
        |arguments: &[&str]| Command::new("git").args(arguments).output().ok().filter(|output| output.status.success());
    // The log of HEAD changes with every commit, HEAD itself only with the branch. A worktree keeps
    // both elsewhere. A missing path would make every build run this script again.
    for file in ["logs/HEAD", "HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])
            .map(|path| String::from_utf8_lossy(&path.stdout).trim().to_string());
        if let Some(path) = path.filter(|path| std::path::Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    println!("cargo::rerun-if-env-changed=DOVETAIL_REVISION");
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return std::env::var("DOVETAIL_REVISION").unwrap_or_else(|_| "unknown".into());
    };
    let dirty = git(&["status", "--porcelain", "--untracked-files=no", "--", ":!benches/results"])
        .is_some_and(|status| !status.stdout.is_empty());
    format!("{}{}", String::from_utf8_lossy(&head.stdout).trim(), if dirty { "-dirty" } else { "" })
}
