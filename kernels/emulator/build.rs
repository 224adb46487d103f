//! Compiles the kernels and the emulated GPU that runs them into one library, by the host's C++ compiler: what `CXX` names, or `c++`.
//!
//! The library calls itself `libcuda.so`. A program that is linked with it has it loaded when cudarc opens the driver by this name, and
//! the loader answers with what is loaded already, whatever else is installed.
//!
//! C++ has no kernel launches and no shared memory: the sources are translated, line by line. What the translation does not
//! know is an error.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: &str = "kernels/emulator";

// Kernels look at memory as other types than it was written as, and nvcc lets them. The library is there when the program starts, so that its
// variables of threads have fixed places.
const FLAGS: &str = "-x c++ -std=c++17 -O2 -g1 -fPIC -fno-strict-aliasing -ftls-model=initial-exec -Wall -Wno-sign-compare \
                     -Wno-unknown-pragmas -Werror=frame-larger-than=32768";
// Of kernels: indices beyond the end of an array, misaligned addresses, shifts by more than there are bits. What finds one traps.
const CHECKS: &str = "-fsanitize=undefined -fsanitize-undefined-trap-on-error";

/// Compiles the kernels and the emulator, and links the crate with them.
pub fn build(out: &Path) -> Result<(), Box<dyn Error>> {
    // Nobody is to take it for a product.
    if std::env::var("PROFILE")? == "release" {
        return Err("DOVETAIL_CUDA=emulated is for tests, and is not built with --release".into());
    }
    println!("cargo::warning=DOVETAIL_CUDA=emulated: the GPUs of this build are emulated on the CPU, for tests");
    super::rerun_if_changed(&["CXX"]);
    let folder = compile_all(out)?;
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=dylib=cuda");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    Ok(())
}

/// Makes the library, unless these sources were compiled by the same compiler before; the folder that has it.
fn compile_all(out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let sources = super::sources("kernels", &["cu", "cuh", "h"])?;
    let own = super::sources(FOLDER, &["cpp", "h"])?;
    let stamp = super::stamp(&[sources.clone(), own].concat(), (compiler(), include_str!("build.rs")))?;
    super::made_once(&format!("emulated-{stamp}"), out, |folder| {
        let mut to_compile = Vec::new();
        for source in &sources {
            let name = source.file_name().and_then(|name| name.to_str()).ok_or("a source without a name")?;
            let translated = translate(name, &std::fs::read_to_string(source)?)?;
            let to = folder.join(name);
            std::fs::write(&to, translated)?;
            if name.ends_with(".cu") {
                to_compile.push(to);
            }
        }
        to_compile.extend(["machine.cpp", "driver.cpp"].map(|name| Path::new(FOLDER).join(name)));
        let objects = compile(&to_compile, folder)?;
        let mut link = Command::new(compiler());
        link.args(["-shared", "-Wl,-soname,libcuda.so", "-Wl,--no-undefined", "-o"]).arg(folder.join("libcuda.so"));
        succeed(link.args(objects).args(["-lpthread", "-ldl"]).spawn()?, "linking the emulated GPU")
    })
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// Compiles each source to an object, as many at a time as cargo says.
fn compile(sources: &[PathBuf], folder: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let at_once = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1).max(1);
    let mut objects = Vec::new();
    for some in sources.chunks(at_once) {
        let mut running = Vec::new();
        for source in some {
            let object = folder.join(source.file_name().ok_or("a source without a name")?).with_extension("o");
            let mut command = Command::new(compiler());
            command.args(FLAGS.split(' '));
            if source.starts_with(folder) {
                command.args(CHECKS.split(' '));
            }
            command.args(["-I", FOLDER]).arg("-c").arg(source).arg("-o").arg(&object);
            running.push((command.spawn()?, source));
            objects.push(object);
        }
        for (child, source) in running {
            succeed(child, &format!("compiling {}", source.display()))?;
        }
    }
    Ok(objects)
}

fn succeed(mut child: std::process::Child, what: &str) -> Result<(), Box<dyn Error>> {
    match child.wait()?.success() {
        true => Ok(()),
        false => Err(format!("{what} for the emulated GPU failed").into()),
    }
}

/// A source of kernels as C++ that includes the emulator's headers, with as many lines.
fn translate(name: &str, source: &str) -> Result<String, Box<dyn Error>> {
    let mut lines = vec![format!("#line 1 \"kernels/{name}\"")];
    for (number, line) in source.lines().enumerate() {
        let place = format!("{name}:{}", number + 1);
        // One copy of such an argument for all threads: of those with many columns, nothing else would take as long.
        let line =
            constants(&include(line)).ok_or_else(|| format!("{place}: a constant that is not understood: {line}"))?;
        let line =
            shared_variables(&line).ok_or_else(|| format!("{place}: shared memory that is not understood: {line}"))?;
        let line =
            launches(&line, &place).ok_or_else(|| format!("{place}: a launch that is not understood: {line}"))?;
        lines.push(line);
    }
    Ok(lines.join("\n") + "\n")
}

/// CUDA's headers become the emulator's.
fn include(line: &str) -> String {
    let is_of = |prefixes: &[&str]| prefixes.iter().any(|prefix| line.starts_with(&format!("#include <{prefix}")));
    if is_of(&["cuda_runtime.h", "cuda_pipeline.h", "nvtx3/"]) {
        return "#include \"cuda.h\"".into();
    }
    if is_of(&["cub/", "thrust/"]) {
        return "#include \"cub.h\"".into();
    }
    line.into()
}

/// A constant of the grid is the launch's own.
fn constants(line: &str) -> Option<String> {
    let Some((before, after)) = line.split_once("const __grid_constant__ ") else {
        return (!line.contains("__grid_constant__")).then(|| line.into());
    };
    let (kind, rest) = after.split_once(' ')?;
    Some(format!("{before}const {kind}& {rest}"))
}

/// A declaration of shared memory says that its variables begin there, and dynamic shared memory is asked for.
fn shared_variables(line: &str) -> Option<String> {
    let Some(start) = line.find("__shared__") else { return Some(line.into()) };
    let statement = line.trim().strip_suffix(';')?;
    if let Some(dynamic) = statement.strip_prefix("extern __shared__ __align__(16) ") {
        let (kind, name) = dynamic.strip_suffix("[]")?.split_once(' ')?;
        return Some(format!("{kind}* const {name} = static_cast<{kind}*>(::emulator::dynamic_shared());"));
    }
    // Nothing but blanks before it, and after its type names with or without a length.
    let declared = statement.strip_prefix("__shared__ ")?;
    let declared = declared.strip_prefix("__align__(16) ").unwrap_or(declared);
    let (kind, names) = declared.split_once(' ')?;
    let is_word = |text: &str| !text.is_empty() && text.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    let names: Vec<&str> = names.split(", ").map(|name| name.split('[').next().unwrap_or(name)).collect();
    let is_known = is_word(kind) && names.iter().all(|name| is_word(name)) && line[..start].trim().is_empty();
    is_known.then(|| format!("{line} ::emulator::begin_shared_variables({});", names.join(", ")))
}

/// `kernel<<<grid, block, bytes, stream>>>` becomes a call that answers what is called with the kernel's arguments.
fn launches(line: &str, place: &str) -> Option<String> {
    let Some(start) = line.find("<<<") else { return (!line.contains(">>>")).then(|| line.into()) };
    let (before, after) = (&line[..start], &line[start + 3..]);
    let (shape, rest) = after.split_once(">>>")?;
    // The kernel's name, with what it is instantiated for.
    let mut depth = 0;
    let name_start = before.char_indices().rev().take_while(|&(_, letter)| {
        depth += i32::from(letter == '>') - i32::from(letter == '<');
        depth > 0 || letter == '<' || letter.is_alphanumeric() || matches!(letter, '_' | ':')
    });
    let name_start = name_start.last()?.0;
    let kernel = &before[name_start..];
    let is_whole = rest.starts_with('(') && !rest.contains("<<<") && depth == 0;
    is_whole
        .then(|| format!("{}::emulator::launch(\"{place}, {kernel}\", {kernel}, {shape}){rest}", &before[..name_start]))
}
