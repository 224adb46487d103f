//! Compiles the kernels with nvcc, for every GPU that Dovetail supports, into one static library.
//!
//! Environment variables:
//!
//! * `DOVETAIL_CUDA` sets the mode without an nvcc, or with one of CUDA before 13.0. `auto` (the
//!   default) builds for the CPU only and warns, `require` fails, and `off` does not look for nvcc.
//!   `emulated` is for tests: the host's compiler compiles the kernels, which run on the CPU
//!   (emulator/README.md).
//! * `NVCC` names nvcc, by its path or by a name in `PATH`. Without it, the build searches
//!   `CUDA_HOME/bin`, `PATH` and `/usr/local/cuda/bin`, in this order.
//! * `DOVETAIL_CUDA_ARCHITECTURES` (default `80,90,100,120`) names the architectures to compile
//!   for. The newest is added as PTX, for later GPUs.
//! * `DOVETAIL_CUDA_LINES=1` keeps source lines for profilers, which more than doubles the kernels'
//!   size.
//! * `DOVETAIL_CUDA_LIBRARY` names a folder with the kernels as a shared library. The program loads
//!   the library at each start, so that one program can be measured with several
//!   (benches/gpu/tune.sh).

#[path = "emulator/build.rs"]
mod emulator;

use std::collections::hash_map::DefaultHasher;
use std::error::Error;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

const ARCHITECTURES: &str = "80,90,100,120";

const FLAGS: &str = "--lib -std=c++17 -O3 -Xcompiler -fPIC,-Wall --compress-mode=size";

/// First tested release of CUDA. Earlier releases have CUB elsewhere, and lack some architectures.
const RELEASE_MIN: (u32, u32) = (13, 0);

/// The kernels of a build.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// No kernels.
    None,
    /// Kernels for GPUs.
    Gpu,
    /// Kernels that run on the CPU, for tests.
    Emulated,
}

/// Compiles and links the kernels. Sets `cfg(dovetail_cuda)` for the crate, and also
/// `cfg(dovetail_emulated)` if the kernels run on the CPU.
pub fn build(out: &Path) -> Result<Kernels, Box<dyn Error>> {
    println!("cargo::rustc-check-cfg=cfg(dovetail_cuda)");
    println!("cargo::rustc-check-cfg=cfg(dovetail_emulated)");
    println!("cargo::rerun-if-changed=kernels");
    rerun_if_changed(&["DOVETAIL_CUDA"]);
    let mode = std::env::var("DOVETAIL_CUDA").unwrap_or_else(|_| "auto".into());
    match mode.as_str() {
        "off" => {
            println!("cargo::rustc-env=DOVETAIL_WHY_NO_KERNELS=it was made with DOVETAIL_CUDA=off");
            return Ok(Kernels::None);
        }
        "emulated" => {
            emulator::build(out)?;
            println!("cargo::rustc-cfg=dovetail_cuda");
            println!("cargo::rustc-cfg=dovetail_emulated");
            return Ok(Kernels::Emulated);
        }
        "auto" | "require" => {}
        other => return Err(format!("DOVETAIL_CUDA is {other:?}; write require, auto, off or emulated").into()),
    }
    rerun_if_changed(&["DOVETAIL_CUDA_LIBRARY", "DOVETAIL_CUDA_ARCHITECTURES", "DOVETAIL_CUDA_LINES"]);
    if let Ok(folder) = std::env::var("DOVETAIL_CUDA_LIBRARY") {
        println!("cargo::rustc-cfg=dovetail_cuda");
        println!("cargo::rustc-link-search=native={folder}");
        println!("cargo::rustc-link-lib=dylib=dovetail_kernels");
        return Ok(Kernels::Gpu);
    }
    let Some(nvcc) = find_nvcc()? else {
        let hint = "set CUDA_HOME, or install the wheels of kernels/requirements.txt and point CUDA_HOME to them";
        if mode == "require" {
            return Err(format!("DOVETAIL_CUDA=require, and no nvcc was found: {hint}").into());
        }
        println!("cargo::warning=no nvcc was found, so that this build runs joins on the CPU only; {hint}");
        println!("cargo::rustc-env=DOVETAIL_WHY_NO_KERNELS=no nvcc was found when it was made");
        return Ok(Kernels::None);
    };
    let release = release_of(&nvcc)?;
    if release < RELEASE_MIN {
        let (found, least) = (words(release), words(RELEASE_MIN));
        let why = format!("{} is of CUDA {found}, and the kernels need {least} or later", nvcc.display());
        if mode == "require" {
            return Err(format!("DOVETAIL_CUDA=require, but {why}").into());
        }
        println!("cargo::warning={why}: this build runs joins on the CPU only");
        println!(
            "cargo::rustc-env=DOVETAIL_WHY_NO_KERNELS=the nvcc that was found when it was made is of CUDA {found}"
        );
        return Ok(Kernels::None);
    }
    let root = nvcc.parent().and_then(Path::parent).ok_or("nvcc lies in no toolkit")?.to_path_buf();
    let folder = compile(&nvcc, release, &root, out)?;
    println!("cargo::rustc-cfg=dovetail_cuda");
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=static=dovetail_kernels");
    for folder in ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"] {
        let folder = root.join(folder);
        if folder.join("libcudart_static.a").exists() {
            println!("cargo::rustc-link-search=native={}", folder.display());
        }
    }
    // The static runtime opens the driver at first use, so the binary starts without a driver.
    println!("cargo::rustc-link-lib=static=cudart_static");
    for library in ["stdc++", "rt", "dl", "pthread"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
    Ok(Kernels::Gpu)
}

/// Runs the build again when one of these variables changes. Each mode names only the variables
/// that it reads, so that others cause no rebuild.
fn rerun_if_changed(variables: &[&str]) {
    for variable in variables {
        println!("cargo::rerun-if-env-changed={variable}");
    }
}

/// Returns the folder `name` in the target folder, and fills it by `make` if it is missing. All
/// builds share it, because compiling kernels takes minutes and each Cargo profile and tool has its
/// own `OUT_DIR`.
fn made_once(
    name: &str,
    out: &Path,
    make: impl FnOnce(&Path) -> Result<(), Box<dyn Error>>,
) -> Result<PathBuf, Box<dyn Error>> {
    // OUT_DIR is TARGET/PROFILE/build/PACKAGE/out.
    let all = out.ancestors().nth(4).ok_or("OUT_DIR is in no target folder")?.join("kernels");
    let folder = all.join(name);
    if folder.exists() {
        return Ok(folder);
    }
    let unfinished = out.join("kernels");
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished)?;
    }
    std::fs::create_dir_all(&unfinished)?;
    make(&unfinished)?;
    std::fs::create_dir_all(all)?;
    match std::fs::rename(&unfinished, &folder) {
        // Another build has made the folder meanwhile.
        Err(_) if folder.exists() => {}
        renamed => renamed?,
    }
    Ok(folder)
}

/// Lists the files of a folder with one of the extensions, sorted by name.
fn sources(folder: &str, extensions: &[&str]) -> std::io::Result<Vec<PathBuf>> {
    let files: std::io::Result<Vec<PathBuf>> = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let mut files = files?;
    files.retain(|path| path.extension().is_some_and(|extension| extensions.iter().any(|&own| extension == own)));
    files.sort();
    Ok(files)
}

/// Returns a hash that identifies a build: its sources and its other inputs.
fn stamp(sources: &[PathBuf], by: impl Hash) -> std::io::Result<String> {
    let mut hasher = DefaultHasher::new();
    by.hash(&mut hasher);
    for source in sources {
        (source, std::fs::read(source)?).hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Finds nvcc and resolves links, because its toolkit is next to the real file. `None` if `NVCC` is
/// not set and no nvcc is found.
fn find_nvcc() -> Result<Option<PathBuf>, Box<dyn Error>> {
    rerun_if_changed(&["NVCC"]);
    let named = std::env::var_os("NVCC").map(PathBuf::from);
    let is_bare = named.as_ref().is_some_and(|named| named.components().count() == 1);
    if named.is_none() || is_bare {
        rerun_if_changed(&["CUDA_HOME", "PATH"]);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |mut candidates: Box<dyn Iterator<Item = PathBuf> + '_>| candidates.find(|nvcc| nvcc.is_file());
    let nvcc = match named {
        Some(named) => {
            let folders = std::env::split_paths(&path).filter(|_| is_bare);
            let there = found(Box::new(folders.map(|folder| folder.join(&named)).chain([named.clone()])));
            Some(there.ok_or_else(|| format!("NVCC is {}, and there is no such file", named.display()))?)
        }
        None => {
            let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
            let folders = home.into_iter().chain(std::env::split_paths(&path));
            let folders = folders.chain([PathBuf::from("/usr/local/cuda/bin")]);
            found(Box::new(folders.map(|folder| folder.join("nvcc"))))
        }
    };
    Ok(nvcc.map(|nvcc| nvcc.canonicalize()).transpose()?)
}

/// Returns a compiler's CUDA release, from a line such as `Cuda compilation tools, release 13.0,
/// V13.0.48`.
fn release_of(nvcc: &Path) -> Result<(u32, u32), Box<dyn Error>> {
    let made = Command::new(nvcc).arg("--version").output().map_err(|error| format!("{}: {error}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    let release = said.split("release ").nth(1).and_then(|rest| rest.split([',', ' ', '\n']).next());
    let parts = release.and_then(|release| release.split_once('.'));
    let release = parts.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    release.ok_or_else(|| format!("{} --version tells no release of CUDA: {said:?}", nvcc.display()).into())
}

fn words((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

/// Compiles the kernels, unless the same compiler has compiled these sources before. Returns their
/// folder.
fn compile(nvcc: &Path, release: (u32, u32), root: &Path, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let sources = sources("kernels", &["cu", "cuh", "h"])?;
    let architectures = std::env::var("DOVETAIL_CUDA_ARCHITECTURES").unwrap_or_else(|_| ARCHITECTURES.into());
    let architectures: Vec<&str> = architectures.split(',').map(str::trim).collect();
    let lines = std::env::var("DOVETAIL_CUDA_LINES").is_ok_and(|lines| lines == "1");
    let stamp = stamp(&sources, (nvcc, release, &architectures, lines, include_str!("build.rs")))?;
    made_once(&stamp, out, |folder| {
        let mut command = Command::new(nvcc);
        command.args(FLAGS.split(' '));
        command.args(lines.then_some("-lineinfo"));
        let threads = std::env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
        command.args(["--threads", &threads]);
        // The wheels and the toolkit keep CUB in different places.
        command.arg("-I").arg(root.join("include/cccl"));
        for architecture in &architectures {
            command.arg("-gencode").arg(format!("arch=compute_{architecture},code=sm_{architecture}"));
        }
        let number = |name: &&&str| name.parse::<u32>().unwrap_or(0);
        let newest = architectures.iter().max_by_key(number).ok_or("no architectures")?;
        command.arg("-gencode").arg(format!("arch=compute_{newest},code=compute_{newest}"));
        command.args(sources.iter().filter(|path| path.extension().is_some_and(|extension| extension == "cu")));
        let made = command.arg("-o").arg(folder.join("libdovetail_kernels.a")).output()?;
        if !made.status.success() {
            let said = format!("{}{}", String::from_utf8_lossy(&made.stdout), String::from_utf8_lossy(&made.stderr));
            return Err(format!("compiling the kernels failed: {command:?}\n{said}").into());
        }
        Ok(())
    })
}
