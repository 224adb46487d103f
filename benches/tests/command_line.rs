//! `dovetail-bench` from its command line to its results: what is listed, what is written, what is refused.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

/// A suite at a size that takes a moment.
const SMALL: [&str; 10] = [
    "joins",
    "--rows=1000",
    "--key-bytes=4",
    "--runs=2",
    "--threads=2",
    "--device-memory=64MiB",
    "--host-memory=256MiB",
    "--strategies=hash,sort-merge,auto",
    "--out=results.jsonl",
    "--seed=7",
];

/// The program, without the settings of the user who runs the tests.
fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dovetail-bench"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("DOVETAIL_")) {
        command.env_remove(name);
    }
    command.env("COLUMNS", "100").env("NO_COLOR", "1");
    command
}

fn run(arguments: &[&str]) -> Output {
    command().args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The JSON values on the lines of stdout.
fn json_lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn suites_are_listed_for_people_and_machines() {
    let listed = json_lines(&run(&["--json"]));
    let names: Vec<&str> = listed.iter().map(|suite| suite["suite"].as_str().unwrap()).collect();
    assert!(names.contains(&"joins") && names.len() > 1, "{names:?}");
    let text = stdout(&run(&[]));
    assert!(names.iter().all(|name| text.contains(name)), "{text}");
    assert!(text.contains("dovetail-bench SUITE"), "{text}");
}

#[test]
fn a_suite_prints_and_appends_a_line_for_each_strategy() {
    let folder = tempfile::tempdir().unwrap();
    let bench = |more: &[&str]| {
        let output = command().args(SMALL).args(more).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        output
    };
    let printed = json_lines(&bench(&["--json"]));
    let asked: Vec<&str> = printed.iter().map(|line| line["asked"].as_str().unwrap()).collect();
    assert_eq!(asked, ["hash", "sort-merge", "auto"]);
    for line in &printed {
        assert_eq!((line["build_rows"].as_u64(), line["probe_rows"].as_u64()), (Some(1000), Some(2000)), "{line}");
        assert_eq!(line["result_rows"].as_u64(), Some(2000), "{line}");
        assert!(line["runs"].as_u64().is_some_and(|runs| (2..=16).contains(&runs)), "{line}");
        assert_eq!((line["verified"].as_bool(), line["seed"].as_u64()), (Some(true), Some(7)), "{line}");
        assert!(line["seconds"].as_f64().unwrap() > 0.0 && line["floor_seconds"].as_f64().unwrap() > 0.0, "{line}");
        assert!(line["machine"]["cores"].as_u64().unwrap() > 0, "{line}");
        assert!(line["command"].as_str().unwrap().starts_with("dovetail-bench joins --rows=1000"), "{line}");
        assert!(line["date"].is_string() && line["version"].is_string(), "{line}");
    }
    let kept = || -> Vec<Value> {
        let text = fs::read_to_string(folder.path().join("results.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    assert_eq!(kept(), printed);
    // For people a table; the file goes on where it was.
    let text = stdout(&bench(&[]));
    assert_eq!(text.lines().count(), 1 + 3, "{text}");
    assert!(text.lines().next().unwrap().contains("strategy") && text.contains("sort-merge"), "{text}");
    assert!(text.lines().last().unwrap().contains(" (auto)"), "{text}");
    assert_eq!(kept().len(), 6);
}

#[test]
fn wrong_arguments_are_refused_with_the_accepted_values() {
    for (wrong, words) in [
        (&["--rows=many"][..], "a number of rows below 4G, such as"),
        (&["--rows=5G"], "a number of rows below 4G, such as"),
        (&["--key-bytes=5"], "write 4"),
        (&["--keys=pretty"], "write dense, sparse"),
        (&["--probe-keys=zipf:-1"], "is not an exponent"),
        (&["--match-ratio=2"], "write a number from 0 to 1"),
        (&["--runs=0"], "it takes a whole number from 1 to 1000"),
        (&["--ratio=1,0"], "invalid value '0' for '--ratio <RATIO>': it takes a whole number from 1 to 1024"),
        (&["--threads=0"], "it takes a whole number from 1 to 1024"),
        (&["--cases=0"], "it takes a whole number from 1 to 10000"),
        (&["--device=quantum:1"], "quantum:1"),
        (&["--device-memory=plenty"], "plenty"),
    ] {
        let output = run(&[&["joins"], wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", stdout(&output));
        assert!(stderr(&output).contains(words), "{wrong:?}: {}", stderr(&output));
    }
    for (wrong, status, words) in [
        (&["nothing"][..], 2, "there is no suite \"nothing\"; there are wu-7"),
        (&["joins", "--strategies=magic"], 2, "radix-hash"),
        (&["joins", "--cases=3"], 2, "--cases sets the number of random joins"),
        (&["joins", "--rows=1000", "--out=no/such/folder.jsonl"], 1, "opening no/such/folder.jsonl"),
    ] {
        let output = run(wrong);
        assert_eq!(output.status.code(), Some(status), "{wrong:?}: {}", stdout(&output));
        assert!(
            stderr(&output).starts_with("error: ") && stderr(&output).contains(words),
            "{wrong:?}: {}",
            stderr(&output)
        );
        assert_eq!(stderr(&output).lines().count(), 1, "{wrong:?}: {}", stderr(&output));
    }
}

/// The lines of a file of results.
fn lines(file: &std::path::Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_published_experiment_runs_at_a_scale() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.jsonl");
    let mut bench = vec!["wu-13", "--json", "--scale", "1/65536", "--runs", "3", "--match-ratio", "0.5"];
    bench.extend(["--device-memory", "64MiB", "--host-memory", "256MiB", "--out", file.to_str().unwrap()]);
    let output = run(&bench);
    assert!(output.status.success(), "{}", stderr(&output));
    let measured = json_lines(&output);
    assert_eq!(measured, lines(&file));
    let asked: Vec<&str> = measured.iter().map(|line| line["asked"].as_str().unwrap()).collect();
    assert_eq!(asked, ["hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"]);
    for line in &measured {
        assert_eq!((&line["build_rows"], &line["match_ratio"]), (&2048.into(), &0.5.into()));
        assert_eq!(line["verified"], true);
        assert!(line["runs"].as_u64().is_some_and(|runs| (3..=24).contains(&runs)), "{line}");
        assert!(line["command"].as_str().unwrap().starts_with("dovetail-bench wu-13"));
        assert!(line["date"].is_string() && line["version"].is_string() && line["machine"]["cores"].is_u64());
    }
    // Another run is appended.
    assert!(run(&bench).status.success());
    assert_eq!(lines(&file).len(), 10);
}

#[test]
fn concurrent_joins_are_timed_and_checked() {
    let output = run(&[
        "choices",
        "--cases=1",
        "--scale=1/1024",
        "--runs=1",
        "--strategies=auto",
        "--host-memory=1GiB",
        "--at-once=3",
        "--json",
    ]);
    let printed = json_lines(&output);
    let joins: Vec<&Value> = printed.iter().filter(|line| line["asked"] == "auto").collect();
    assert_eq!(joins.len(), 1, "{printed:?}");
    assert_eq!((&joins[0]["at_once"], &joins[0]["verified"]), (&Value::from(3), &Value::from(true)));
    assert!(joins[0]["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn unknown_suites_and_options_that_a_suite_does_not_have_are_refused() {
    let unknown = run(&["wu-99"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("wu-13"), "{}", stderr(&unknown));
    let fixed = run(&["q95", "--keys", "sparse"]);
    assert_eq!(fixed.status.code(), Some(2));
    assert!(stderr(&fixed).contains("--scale"), "{}", stderr(&fixed));
}

/// They were once passed over.
#[test]
fn options_without_a_suite_are_refused() {
    for (given, named) in [
        (&["--rows", "16M"][..], "--rows"),
        (&["--exhaustive"], "--exhaustive"),
        (&["--seed=1", "--runs", "5", "--device=host"], "--runs, --device, --seed"),
        (&["--scale", "1/16", "--keys", "sparse", "--json"], "--scale, --keys"),
    ] {
        let output = run(given);
        assert_eq!((output.status.code(), &*stdout(&output)), (Some(2), ""), "{given:?}");
        let said = stderr(&output);
        assert!(said.contains(&format!("{named} without a suite")) && said.lines().count() == 1, "{given:?}: {said}");
        assert!(said.contains("dovetail-bench joins"), "{given:?}: {said}");
    }
}
