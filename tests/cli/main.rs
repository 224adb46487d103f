//! The command line as people and scripts use it: the built binary, its output and its exit status.

mod arriving;
mod client;
mod ending;
mod harness;
mod lost_server;
mod outputs;
mod serve;

use harness::{run, stderr, stdout};

#[test]
fn help_and_version_succeed_and_name_every_command() {
    let help = run(&["--help"]);
    assert!(help.status.success());
    let names = "serve demo put get join explain tables jobs cancel drop topology doctor completions man";
    for name in names.split(' ') {
        assert!(stdout(&help).contains(name), "{name} is not in the help");
        let own = run(&[name, "--help"]);
        assert!(own.status.success(), "{name} --help");
        assert!(stdout(&own).contains("Usage: dovetail"), "{name} --help");
    }
    let version = run(&["--version"]);
    assert!(
        stdout(&version).starts_with(concat!("dovetail ", env!("CARGO_PKG_VERSION"), " (")),
        "{}",
        stdout(&version)
    );
}

#[test]
fn a_wrong_command_line_is_status_2_and_a_failure_status_1() {
    for wrong in [
        &["fly"][..],
        &["put"],
        &["join", "a", "b"],
        &["get"],
        &["serve", "--listen", "nowhere"],
        &["demo", "--scale", "0"],
    ] {
        let output = run(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", stderr(&output));
        assert!(stderr(&output).starts_with("error: "), "{wrong:?}: {}", stderr(&output));
    }
    // Port 1 of loopback has no listener.
    let unreachable = run(&["tables", "--server", "http://127.0.0.1:1"]);
    assert_eq!(unreachable.status.code(), Some(1));
    assert!(stderr(&unreachable).contains("cannot reach a server at http://127.0.0.1:1"), "{}", stderr(&unreachable));
    assert_eq!(stderr(&unreachable).lines().count(), 1, "{}", stderr(&unreachable));
}

#[test]
fn errors_for_machines_are_one_json_object() {
    let output = run(&["tables", "--json", "--server", "http://127.0.0.1:1"]);
    let error: serde_json::Value = serde_json::from_str(&stderr(&output)).unwrap();
    assert_eq!(error["error"]["kind"], "unavailable");
    assert!(error["error"]["message"].as_str().unwrap().contains("127.0.0.1:1"));
    assert_eq!(stdout(&output), "");
    let output = run(&["join", "a", "b", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    let error: serde_json::Value = serde_json::from_str(&stderr(&output)).unwrap();
    assert_eq!(error["error"]["kind"], "invalid_argument");
    assert!(error["error"]["message"].as_str().unwrap().contains("--on <COLUMNS>"), "{error}");
}

#[test]
fn completions_are_read_by_bash_and_man_pages_are_written() {
    let completions = run(&["completions", "bash"]);
    assert!(completions.status.success(), "{}", stderr(&completions));
    let script = format!(
        "{}\nCOMP_WORDS=(dovetail serve --host-m); COMP_CWORD=2; _dovetail dovetail --host-m serve; echo \"${{COMPREPLY[@]}}\"",
        stdout(&completions)
    );
    let completed = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!((&*stdout(&completed), &*stderr(&completed)), ("--host-memory\n", ""));
    assert_eq!(run(&["completions", "cmd.exe"]).status.code(), Some(2));

    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    let written = run(&["man", pages.to_str().unwrap()]);
    assert!(written.status.success(), "{}", stderr(&written));
    let mut names = harness::names_in(&pages);
    names.sort();
    assert!(names.contains(&"dovetail.1".to_owned()) && names.contains(&"dovetail-serve.1".to_owned()), "{names:?}");
    assert_eq!(stdout(&written).lines().count(), names.len());
    std::fs::write(folder.path().join("file"), "").unwrap();
    let refused = run(&["man", folder.path().join("file").to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
}

#[test]
fn an_invalid_server_address_is_explained() {
    for (address, expected) in
        [("ftp://h:1", "unknown scheme \"ftp\""), ("http://", "not an address"), ("http://a b", "not an address")]
    {
        let output = run(&["tables", "--server", address]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(expected), "{address}: {}", stderr(&output));
    }
}

#[test]
fn the_joins_of_the_demo_have_the_expected_rows() {
    let output = run(&["demo", "--scale", "0.01", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let events = harness::json_lines(&output);
    let joins: Vec<_> = events.iter().filter(|event| event["event"] == "join").collect();
    assert!(joins.len() >= 6, "{} joins", joins.len());
    for join in &joins {
        assert_eq!(join["rows"], join["expected"], "{}", join["title"]);
        assert!(join["rows"].as_u64().unwrap() > 0, "{} is empty", join["title"]);
        // A measured time far from the prediction is explained, also in the text that people see.
        let plan = &join["plan"];
        let [predicted, measured] = ["predicted_seconds", "measured_seconds"]
            .map(|name| plan[name].as_f64().unwrap_or_else(|| panic!("{plan}")));
        let ratio = measured.max(predicted) / measured.min(predicted);
        let is_far = ratio >= 2.0 && (measured - predicted).abs() >= 1e-3;
        assert_eq!(plan["deviation"].is_string(), is_far, "{predicted} s, {measured} s: {plan}");
        assert_eq!(plan["text"].as_str().unwrap().contains("Predictions assume"), is_far, "{plan}");
    }
    assert_eq!(events.last().unwrap()["event"], "done");
}

#[test]
fn the_demo_makes_the_folder_that_it_saves_into() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("new/folder");
    let output = run(&["demo", "--scale", "0.001", "--json", "--save", there.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(harness::names_in(&there).contains(&"orders.parquet".to_owned()));
    std::fs::write(folder.path().join("file"), "").unwrap();
    // The demo fails before its work, which would take minutes at this scale.
    let output = run(&["demo", "--scale", "100", "--save", folder.path().join("file").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: creating the folder "), "{}", stderr(&output));
    // A demo that would replace a file is refused, too.
    std::fs::write(folder.path().join("lineitem.parquet"), "mine").unwrap();
    let output = run(&["demo", "--scale", "100", "--save", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("lineitem.parquet already exists, and the demo replaces no files"));
    assert_eq!(std::fs::read_to_string(folder.path().join("lineitem.parquet")).unwrap(), "mine");
}

/// Regression test: files of some tables were left, and the next demo refused to replace them.
#[test]
fn a_demo_that_fails_to_save_all_tables_leaves_none_of_its_files() {
    let saving = |then: &dyn Fn(&std::path::Path, &mut std::process::Child)| {
        let folder = tempfile::tempdir().unwrap();
        let mut child = harness::begin(folder.path(), &["demo", "--scale", "0.1", "--save", "."]);
        let is_at_second = || harness::names_in(folder.path()).iter().any(|name| name.starts_with("orders.parquet"));
        harness::wait_until("the second file to be begun", is_at_second);
        then(folder.path(), &mut child);
        (child.wait_with_output().unwrap(), harness::names_in(folder.path()), folder)
    };
    let (output, names, _) = saving(&|_, child| harness::send_interrupt(child));
    assert_eq!((output.status.code(), &*stderr(&output)), (Some(130), "error: interrupted\n"));
    assert_eq!(names, [""; 0]);
    // A file that another program creates meanwhile stays unchanged.
    let (output, names, folder) = saving(&|folder, _| std::fs::write(folder.join("partsupp.parquet"), "mine").unwrap());
    assert!(stderr(&output).contains("partsupp.parquet already exists, and the demo replaces no files"));
    assert_eq!((output.status.code(), names), (Some(1), vec!["partsupp.parquet".to_owned()]));
    assert_eq!(std::fs::read_to_string(folder.path().join("partsupp.parquet")).unwrap(), "mine");
}

#[test]
fn the_demo_for_people_fits_a_terminal_and_has_no_escapes_when_piped() {
    let output = run(&["demo", "--scale", "0.001", "--streams", "2"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for line in text.lines() {
        assert!(line.chars().count() <= 103, "too wide: {line}");
        assert!(!line.contains('\x1b'), "escape in {line:?}");
    }
    assert!(text.contains("What to try next"), "{text}");
    assert_eq!(stderr(&output), "");
}

#[test]
fn the_doctor_says_what_it_found_and_its_status_follows_the_verdict() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let doctor = |arguments: &[&str]| {
        run(&[&["doctor", "--rates-file", "none", "--root", root.path().to_str().unwrap()], arguments].concat())
    };
    // Limits of files are those of the tests' process, whatever the files say.
    write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n");
    let good = doctor(&["--json"]);
    assert!(matches!(good.status.code(), Some(0 | 3)), "{}", stderr(&good));
    let findings = harness::json_lines(&good);
    let memory = findings.iter().find(|finding| finding["check"] == "memory").unwrap();
    assert_eq!(
        (&memory["found"], &memory["verdict"], &memory["change"]),
        (&"16.0 GiB".into(), &"good".into(), &"".into())
    );
    assert!(findings.last().unwrap()["verdict"].is_string());

    write("proc/self/cgroup", "0::/\n");
    write("sys/fs/cgroup/memory.max", "268435456\n");
    let limited = doctor(&[]);
    assert_eq!(limited.status.code(), Some(3), "{}", stderr(&limited));
    let text = stdout(&limited);
    assert!(text.contains("attention  memory") && text.contains("256.0 MiB of 16.0 GiB"), "{text}");
    assert!(text.contains("→ raise the limit (docker run --memory)"), "{text}");

    write("sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de\n");
    write("sys/bus/pci/devices/0000:1b:00.0/class", "0x030200\n");
    let fault = doctor(&[]);
    assert_eq!(fault.status.code(), Some(4), "{}", stderr(&fault));
    assert!(stdout(&fault).contains("fault"), "{}", stdout(&fault));
    // Rates that are measured are saved, also those of the CPU.
    let rates = root.path().join("rates.json");
    let measured = run(&["doctor", "--measure", "--rates-file", rates.to_str().unwrap()]);
    assert!(matches!(measured.status.code(), Some(0 | 3 | 4)), "{}", stderr(&measured));
    assert!(std::fs::read_to_string(&rates).unwrap().contains("\"calibration\""));
    // The files of this machine.
    let here = run(&["doctor"]);
    assert!(matches!(here.status.code(), Some(0 | 3 | 4)) && stdout(&here).contains("driver"), "{}", stderr(&here));
}
