//! One JSON line per measurement, with what is needed to repeat it: date, commit, machine and command.

use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

/// Prints measurements; with `--record` also appends them to `benches/results/NAME.jsonl`.
pub struct Recorder {
    head: Map<String, Value>,
    file: Option<std::fs::File>,
}

impl Recorder {
    pub fn new(name: &str, record: bool) -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
        let head = json!({
            "benchmark": name,
            "date": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            "commit": dovetail::cli::COMMIT,
            "machine": machine(),
            "command": format!("cargo bench -p dovetail-bench --bench {name} -- {}", arguments.join(" ")),
        });
        let Value::Object(head) = head else { unreachable!("an object was written above") };
        let file = record.then(|| {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
            std::fs::create_dir_all(&folder).expect("a folder for results");
            let path = folder.join(format!("{name}.jsonl"));
            std::fs::File::options().append(true).create(true).open(path).expect("a file of results")
        });
        Self { head, file }
    }

    pub fn write(&mut self, measurement: Value) {
        println!("{measurement}");
        let Some(file) = &mut self.file else { return };
        let mut line = self.head.clone();
        line.extend(measurement.as_object().expect("a measurement is an object").clone());
        writeln!(file, "{}", Value::Object(line)).expect("a line in the file of results");
    }
}

fn machine() -> Value {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (cpuinfo, meminfo) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let model =
        cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let kibibytes = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    let gibibytes =
        kibibytes.and_then(|number| number.parse::<f64>().ok()).map(|number| (number / 104_857.6).round() / 10.0);
    json!({
        "cpu": model,
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "memory_gib": gibibytes,
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
    })
}
