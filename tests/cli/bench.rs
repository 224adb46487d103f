//! `dovetail bench`: its list of suites, a suite for machines, and the file that it appends to.

use serde_json::Value;

use crate::harness::{run, stderr, stdout};

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

#[test]
fn a_suite_measures_every_strategy_and_says_where_and_how() {
    let list = run(&["bench", "--json"]);
    assert!(list.status.success(), "{}", stderr(&list));
    assert!(lines(&stdout(&list)).iter().any(|line| line["suite"] == "wu-13"));

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.jsonl");
    let mut bench = vec!["bench", "wu-13", "--json", "--scale", "1/65536", "--runs", "3", "--match-ratio", "0.5"];
    bench.extend(["--device-memory", "64MiB", "--host-memory", "256MiB", "--out", file.to_str().unwrap()]);
    let output = run(&bench);
    assert!(output.status.success(), "{}", stderr(&output));
    let measured = lines(&stdout(&output));
    assert_eq!(measured, lines(&std::fs::read_to_string(&file).unwrap()));
    let asked: Vec<&str> = measured.iter().map(|line| line["asked"].as_str().unwrap()).collect();
    assert_eq!(asked, ["hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"]);
    for line in &measured {
        assert_eq!((&line["build_rows"], &line["match_ratio"]), (&2048.into(), &0.5.into()));
        assert_eq!((&line["runs"], &line["verified"]), (&3.into(), &true.into()));
        assert!(line["command"].as_str().unwrap().starts_with("dovetail bench wu-13"));
        assert!(line["date"].is_string() && line["version"].is_string() && line["machine"]["cores"].is_u64());
    }
    // Another run is appended.
    assert!(run(&bench).status.success());
    assert_eq!(lines(&std::fs::read_to_string(&file).unwrap()).len(), 10);
}

#[test]
fn what_a_suite_does_not_have_is_refused() {
    let unknown = run(&["bench", "wu-99"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("wu-13"), "{}", stderr(&unknown));
    let fixed = run(&["bench", "q95", "--keys", "sparse"]);
    assert_eq!(fixed.status.code(), Some(1));
    assert!(stderr(&fixed).contains("--scale"), "{}", stderr(&fixed));
}
