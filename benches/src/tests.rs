use clap::FromArgMatches;
use serde_json::{Value, json};

use super::check::Summary;
use super::*;
use dovetail::device::host::{EmulatedLink, HostDevice};
use dovetail::memory::Budget;
use dovetail::planner::Rates;

fn matches(more: &[&str]) -> ArgMatches {
    let words = ["bench"].iter().chain(more);
    BenchArgs::command().try_get_matches_from(words).unwrap()
}

fn args(more: &[&str]) -> BenchArgs {
    BenchArgs::from_arg_matches(&matches(more)).unwrap()
}

fn refused(more: &[&str]) -> Error {
    run(&args(more), &matches(more)).unwrap_err()
}

fn cases(suite: &str, more: &[&str]) -> Vec<Case> {
    let size = Size { scale: 1.0 / 1024.0, seed: 1, cases: 3 };
    suites::find(suite).unwrap().cases(&args(more).axes, size).unwrap()
}

/// A machine with two CPU threads and the suite's scaled device memory, or else `memory`.
fn small(suite: &str, scale: f64, memory: u64) -> Measurable {
    let suite = suites::find(suite).unwrap();
    let machine = Machine {
        device: parse_device("host").unwrap(),
        threads: 2,
        device_memory: device_memory(suite, scale).or(Some(memory)),
        host_memory: 512 << 20,
    };
    let device = machine.open().unwrap();
    let boundaries = Boundaries::measure(&*device, 64 << 20).unwrap();
    Measurable::new(machine, &*device, Rates::host(2), boundaries)
}

#[test]
fn tables_too_large_for_memory_are_refused_before_they_are_made() {
    for suite in ["wu-13", "wu-16", "wu-17", "choices"] {
        let cases = cases(suite, &[]);
        let largest = cases.iter().map(Case::table_bytes).max().unwrap();
        assert!(cases.iter().all(|case| case.table_bytes() > 0 && case.table_bytes() < case.bytes()), "{suite}");
        tables_fit(&cases, largest).unwrap();
        let refused = tables_fit(&cases, largest - 1).unwrap_err();
        assert!(matches!(refused, Error::Exhausted(_)), "{refused:?}");
        assert!(refused.message().contains("--host-memory"), "{refused}");
    }
}

#[test]
fn axes_multiply_and_the_command_line_replaces_them() {
    assert_eq!(cases("joins", &[]).len(), 6);
    let given = cases("joins", &["--rows", "10,20:50", "--ratio", "2,3", "--keys", "sparse", "--payloads", "0/2x8"]);
    let rows: Vec<(u64, u64)> = given
        .iter()
        .map(|case| match case {
            Case::Synthetic(workload) => (workload.build_rows, workload.probe_rows),
            other => panic!("{other:?} is not synthetic"),
        })
        .collect();
    // Each twice, for keys of 4 and of 8 bytes.
    assert_eq!(rows, [(10, 20), (10, 30), (20, 50), (10, 20), (10, 30), (20, 50)]);
    assert!(given.iter().all(|case| case.label().starts_with("sparse") && case.label().ends_with("0/2x8")));
}

#[test]
fn equal_combinations_of_axes_are_one_case() {
    // 8-byte keys make "two columns as wide as the key" and "two columns of 8 bytes" the same.
    let labels: Vec<String> = cases("wu-15", &[]).iter().map(Case::label).collect();
    assert_eq!(labels, ["dense 4 B, 2x4", "dense 4 B, 2x8", "dense 8 B, 2x8"]);
}

#[test]
fn suites_have_unique_names_and_the_published_sizes() {
    let mut names: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), SUITES.len());
    for figure in (7..=17).map(|figure| format!("wu-{figure}")).chain((7..=14).map(|figure| format!("rui-{figure}"))) {
        assert!(suites::find(&figure).is_ok(), "{figure}");
    }
    let full = Size { scale: 1.0, seed: 1, cases: 1 };
    let largest = |name: &str| {
        let cases = suites::find(name).unwrap().cases(&AxisArgs::default(), full).unwrap();
        cases.into_iter().max_by_key(Case::bytes).unwrap()
    };
    let Case::Synthetic(wide) = largest("wu-12") else { panic!("wu-12 is synthetic") };
    assert_eq!((wide.build_rows, wide.probe_rows, wide.payloads.to_string().as_str()), (1 << 27, 1 << 27, "6x4"));
    let Case::Synthetic(out_of_core) = largest("rui-14") else { panic!("rui-14 is synthetic") };
    assert_eq!((out_of_core.build_rows, out_of_core.probe_rows), (256 << 20, 2560 << 20));
    let Case::Sequence(sequence) = largest("wu-16") else { panic!("wu-16 has sequences") };
    assert_eq!((sequence.joins, sequence.fact_rows, sequence.dimension_rows), (8, 1 << 27, 1 << 25));
}

#[test]
fn cases_at_full_size_can_be_made() {
    let full = Size { scale: 1.0, seed: 1, cases: 20 };
    for suite in &SUITES {
        for case in suite.cases(&AxisArgs::default(), full).unwrap() {
            assert_eq!(case.impossible(), None, "{} of {}", case.label(), suite.name);
        }
    }
}

#[test]
fn unknown_suites_and_axes_that_a_suite_lacks_are_refused() {
    let refusal = suites::find("wu-99").unwrap_err();
    assert!(refusal.message().contains("wu-10"), "{refusal}");
    let size = Size { scale: 0.001, seed: 1, cases: 1 };
    let refusal = suites::find("wu-16").unwrap().cases(&args(&["--rows", "5"]).axes, size).unwrap_err();
    assert!(refusal.message().contains("wu-16"), "{refusal}");
    assert!(matches!(refused(&["wu-99"]), Error::Invalid(_)));
    for (flags, words) in [(&["--cases", "3"][..], "--cases"), (&["--exhaustive"], "--exhaustive")] {
        let refusal = refused(&[&["wu-16"], flags].concat());
        assert!(refusal.message().contains(words) && refusal.message().contains("run suite choices"), "{refusal}");
    }
}

#[test]
fn a_suite_is_scaled_down_by_default_until_it_fits() {
    let (suite, axes) = (suites::find("wu-12").unwrap(), AxisArgs::default());
    let bytes = |scale: f64| {
        let cases = suite.cases(&axes, Size { scale, seed: 1, cases: 1 }).unwrap();
        cases.iter().map(Case::bytes).max().unwrap()
    };
    let scale = suite.fitting_scale(&axes, 1, CPU_CASE_BYTES).unwrap();
    assert!(bytes(scale) <= CPU_CASE_BYTES && bytes(2.0 * scale) > CPU_CASE_BYTES, "{scale}");
    assert_eq!(suite.fitting_scale(&axes, 1, u64::MAX).unwrap(), 1.0);
}

#[test]
fn every_suite_runs_small_with_every_strategy_and_is_verified() {
    let scale = 1.0 / 65536.0;
    let folder = tempfile::tempdir().unwrap();
    for suite in &SUITES {
        let out = folder.path().join(suite.name);
        let words = ["--strategies", "all,auto", "--runs", "1", "--cases", "4", "--out", out.to_str().unwrap()];
        let (args, on) = (args(&words), small(suite.name, scale, 64 << 20));
        run_suite(suite, scale, &args, &on, false).unwrap_or_else(|error| panic!("{}: {error}", suite.name));
        let lines = std::fs::read_to_string(&out).unwrap();
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let measured: Vec<&Value> = lines.iter().filter(|line| line.get("summary").is_none()).collect();
        let cases = suite.cases(&AxisArgs::default(), Size { scale, seed: 1, cases: 4 }).unwrap();
        assert_eq!(measured.len(), 6 * cases.len(), "{}", suite.name);
        assert_eq!(lines.len() - measured.len(), usize::from(suite.is_of_choices()), "{}", suite.name);
        for line in measured {
            // Each line has a value on the figure's axis, and results.
            assert!(!line[suite.axis.field].is_null(), "{} lacks {}", suite.name, suite.axis.field);
            assert!(line["result_rows"].as_u64() > Some(0), "{line}");
            assert!(line["seconds"].as_f64() > Some(0.0), "{line}");
            assert!(line["floor_seconds"].as_f64() > Some(0.0), "{line}");
            assert!(line["phase_seconds"].as_object().is_some_and(|phases| !phases.is_empty()), "{line}");
        }
    }
}

#[test]
fn a_wrong_result_is_not_measured() {
    let case = cases("joins", &["--rows", "1000", "--key-bytes", "4"]).remove(0);
    let mut prepared = case.prepare().unwrap();
    let engine = Engine::new(&small("joins", 1.0, 64 << 20), &mut prepared).unwrap();
    let hash = PlanOverrides::named(Some(Strategy::Hash));
    engine.check(&hash, &prepared).unwrap();
    engine.time(&hash, &prepared).unwrap();
    let right = prepared.expected;
    for wrong in [Summary { checksum: right.checksum ^ 1, ..right }, Summary { rows: right.rows + 1, ..right }] {
        prepared.expected = wrong;
        assert!(matches!(engine.check(&hash, &prepared), Err(Error::Internal(_))), "{wrong:?}");
        assert!(matches!(engine.time(&hash, &prepared), Err(Error::Internal(_))), "a timed run, {wrong:?}");
    }
}

#[test]
fn choices_are_compared_with_every_possible_plan_of_a_join() {
    let scale = 1.0 / 65536.0;
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("choices");
    let words = ["--exhaustive", "--runs", "1", "--cases", "4", "--out", out.to_str().unwrap()];
    let on = small("choices", scale, 256 << 20);
    run_suite(suites::find("choices").unwrap(), scale, &args(&words), &on, false).unwrap();
    let lines = std::fs::read_to_string(&out).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let with = |field: &str| lines.iter().filter(|line| !line[field].is_null()).collect::<Vec<_>>();
    let (measured, planned, summaries) = (with("seconds"), with("planned"), with("summary"));
    assert_eq!((measured.len(), planned.len(), summaries.len()), (6 * 4, 4, 1));
    assert!(measured.iter().all(|line| line["kept"] == false && line["verified"] == true), "the CPU keeps no columns");
    for (line, of_case) in planned.iter().zip(measured.chunks(6)) {
        let ways = line["planned"]["ways"].as_array().unwrap();
        let compositions: Vec<&str> = ways.iter().map(|way| way[0].as_str().unwrap()).collect();
        // Five strategies, both build sides, with and without a filter.
        assert!(compositions.len() >= 20, "{compositions:?}");
        assert!(of_case.iter().all(|line| compositions.contains(&line["plan"].as_str().unwrap())), "{of_case:?}");
        assert_eq!(line["planned"]["left"]["rows"], of_case[0]["build_rows"]);
    }
    let summary = &summaries[0]["summary"];
    assert_eq!(summary["cases"], 4);
    assert!(summary.get("kept").is_none());
    let refusal = refused(&["wu-8", "--exhaustive"]);
    assert!(matches!(&refusal, Error::Invalid(text) if text.contains("suite choices")), "{refusal}");
}

#[test]
fn columns_stay_on_a_device_that_has_memory_of_its_own() {
    let case = cases("joins", &["--rows", "10000:20000", "--key-bytes", "8"]).remove(0);
    let mut prepared = case.prepare().unwrap();
    let memory = Budget::new("device memory", "--device-memory", 64 << 20);
    let rate = 10e9;
    let link = EmulatedLink { to_device_bytes_per_second: rate, from_device_bytes_per_second: rate };
    let device = HostDevice::new(0, 2, memory, Some(link)).unwrap();
    let on = small("joins", 1.0, 64 << 20);
    let mut engine = Engine::on_device(std::sync::Arc::new(device), &on, &mut prepared).unwrap();
    let hash = PlanOverrides::named(Some(Strategy::Hash));
    let kept_bytes = |engine: &Engine, prepared: &Prepared| {
        engine.time(&hash, prepared).unwrap().phases.iter().map(|phase| phase.kept_bytes).sum::<u64>()
    };
    let streamed = engine.check(&hash, &prepared).unwrap();
    assert!(!streamed.kept && streamed.device_memory_max_bytes.is_some());
    assert_eq!(kept_bytes(&engine, &prepared), 0);
    assert!(engine.enable_cache().unwrap());
    let kept = engine.check(&hash, &prepared).unwrap();
    assert!(kept.kept && kept.device_memory_max_bytes.is_none());
    assert_eq!((kept.rows, kept.bytes_in), (streamed.rows, streamed.bytes_in));
    // At least the keys of both sides.
    assert!(kept_bytes(&engine, &prepared) >= 8 * 30_000);
    let asking = Asking { strategies: &[Some(Strategy::Hash), None], runs: 1, exhaustive: true, compares: true };
    let mut of_case = OfCase::default();
    measure_group(&case, &asking, &engine, &prepared, &Progress::of("test", None), &mut of_case).unwrap();
    let OfCase { measured, planned, .. } = of_case;
    assert!(measured.len() > 3 && measured.iter().all(|measured| measured.kept), "{measured:?}");
    assert_eq!(planned.len(), 1);
    for side in ["left", "right"] {
        let rows = &planned[0][side]["rows"];
        assert_eq!(planned[0][side]["columns"][0]["kept"], json!([[0, rows]]), "the key of the {side} side");
    }
    // A device that reads host memory in place has nothing to keep.
    let mut prepared = case.prepare().unwrap();
    assert!(!Engine::new(&on, &mut prepared).unwrap().enable_cache().unwrap());
}

#[test]
fn a_case_that_does_not_fit_the_device_is_skipped_without_an_error() {
    let case = cases("joins", &["--rows", "1M:1M", "--key-bytes", "8"]).remove(0);
    let on = small("joins", 1.0, 1 << 20);
    let asking = Asking { strategies: &[Some(Strategy::Hash)], runs: 1, exhaustive: false, compares: false };
    let OfCase { rows, measured, .. } = measure(&case, &asking, &on, &Progress::of("test", None)).unwrap();
    assert_eq!(rows, [1 << 20; 2]);
    assert!(measured.is_empty(), "{measured:?}");
}
