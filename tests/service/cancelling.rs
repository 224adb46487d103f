//! Cancelling a running join: the time until its device is free.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow_flight::{Action, CancelFlightInfoRequest, FlightInfo};
use dovetail::scheduler::{Job, JobId, JobState};
use prost::Message;

use crate::harness::*;

const STRATEGIES: [&str; 5] = ["hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"];

/// Rows of each side, so that the join takes at least a few tenths of a second.
const ROWS: i64 = 8_000_000;

/// Time limit to stop a job on an idle machine.
const SOON: Duration = Duration::from_millis(100);

/// Time limit to stop a job on a busy machine, where the test's own threads may wait this long.
const LATE: Duration = Duration::from_secs(5);

/// Attempts per stage to free the device within [`SOON`]. A stage that ignores the cancel flag
/// fails each time.
const ATTEMPTS: usize = 6;

/// Makes keys `0..ROWS` in an irregular order, each with its row number.
fn shuffled(factor: i64) -> Vec<RecordBatch> {
    let key = |row: i64| row.wrapping_mul(factor).rem_euclid(ROWS);
    let batch = |start: i64| {
        let keys = Int64Array::from_iter_values((start..start + ROWS / 10).map(key));
        let numbers = Int64Array::from_iter_values(start..start + ROWS / 10);
        RecordBatch::try_from_iter([("k", Arc::new(keys) as ArrayRef), ("v", Arc::new(numbers) as ArrayRef)]).unwrap()
    };
    (0..10).map(|part| batch(part * ROWS / 10)).collect()
}

async fn submit(server: &TestServer, client: &mut Client, strategy: &str) -> (Arc<Job>, FlightInfo) {
    submit_with(server, client, &format!(r#""strategy": "{strategy}""#)).await
}

async fn submit_with(server: &TestServer, client: &mut Client, more: &str) -> (Arc<Job>, FlightInfo) {
    let on = r#""on": [{"left": "k", "right": "k"}]"#;
    let join = format!(r#"{{"join": {{"left": "left", "right": "right", {on}, {more}}}}}"#);
    let info = client.get_flight_info(command(&join)).await.unwrap().into_inner();
    let said: serde_json::Value = serde_json::from_slice(&info.app_metadata).unwrap();
    (server.shared.scheduler.job(JobId(said["job"].as_u64().unwrap())).unwrap(), info)
}

async fn cancel(client: &mut Client, info: FlightInfo) {
    let action = Action::new("CancelFlightInfo", CancelFlightInfoRequest::new(info).encode_to_vec());
    let mut results = client.do_action(action).await.unwrap().into_inner();
    while results.message().await.unwrap().is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_join_of_any_strategy_frees_its_device_soon() {
    let flags = ["--devices=host:1", "--host-memory=2GiB", "--device-memory=1GiB"];
    let server = TestServer::start(&flags).await;
    let mut client = server.client().await;
    // Neither factor has a common divisor with `ROWS`, so all keys are distinct.
    put(&mut client, "left", shuffled(1_000_003)).await.unwrap();
    put(&mut client, "right", shuffled(7_368_787)).await.unwrap();
    let used = server.used_bytes().await;
    let scheduler = &server.shared.scheduler;
    let device = &server.shared.devices[0];
    let is_free = || device.memory().used_bytes() == 0 && scheduler.stats().running == 0;
    for strategy in STRATEGIES {
        let (whole, info) = submit(&server, &mut client, strategy).await;
        eventually("the join ends", async || whole.status().state == JobState::Complete).await;
        let mut run = whole.status().finished.unwrap().duration_since(whole.status().started.unwrap()).unwrap();
        assert_eq!(whole.status().rows, ROWS as u64, "{strategy}");
        cancel(&mut client, info).await;
        // These tenths of the run reach all stages of the join: build, match and write.
        for tenth in [1, 3, 5, 7, 8] {
            // The limit is a tenth of the join's time, if that is longer. A join that ignores the
            // flag takes at least two tenths more.
            let soon = SOON.max(run / 10);
            let mut times = Vec::new();
            for _ in 0..ATTEMPTS {
                let (job, info) = submit(&server, &mut client, strategy).await;
                eventually("it runs", async || job.status().state != JobState::Queued).await;
                tokio::time::sleep(run * tenth / 10).await;
                let ran = matches!(job.status().state, JobState::Running);
                let start = Instant::now();
                cancel(&mut client, info).await;
                while !(job.status().state.is_final() && is_free()) {
                    assert!(
                        start.elapsed() < LATE,
                        "{strategy}, cancelled after {tenth} tenths of {run:?}, holds its device"
                    );
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let end = job.status();
                if ran && end.state == JobState::Cancelled {
                    times.push(start.elapsed());
                } else if let (Some(started), Some(finished)) = (end.started, end.finished) {
                    // The machine was less busy than before, and the join had already finished.
                    run = run.min(finished.duration_since(started).unwrap());
                }
                if times.last().is_some_and(|time| *time <= soon) {
                    break;
                }
            }
            println!("{strategy}: {run:?}; cancelled after {tenth} tenths, and free within {times:?}");
            let best = times.iter().min();
            assert!(best.is_none_or(|best| *best <= soon), "{strategy}, after {tenth} tenths of {run:?}: {times:?}");
            // Near its end, the join may have finished at each attempt.
            assert!(
                tenth > 5 || best.is_some(),
                "{strategy} never ran {tenth} tenths of {run:?} when it was cancelled"
            );
        }
    }
    server.expect_used_bytes(used).await;
}

/// While the arena grows, columns of the result wait until their memory is mapped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_join_frees_its_device_soon_while_the_arena_grows() {
    const COPIES: i64 = 20_000;
    let mut times = Vec::new();
    for attempt in 0..ATTEMPTS {
        let server = TestServer::start(&["--devices=host:1", "--host-memory=3GiB", "--device-memory=256MiB"]).await;
        let mut client = server.client().await;
        let ones: ArrayRef = Arc::new(Int64Array::from_iter_values((0..COPIES).map(|_| 1)));
        let rows = RecordBatch::try_from_iter([("k", ones.clone()), ("v", ones)]).unwrap();
        put(&mut client, "left", vec![rows.clone()]).await.unwrap();
        put(&mut client, "right", vec![rows]).await.unwrap();
        let scheduler = &server.shared.scheduler;
        let device = &server.shared.devices[0];
        // The result has 400 million rows. At 24 bytes each, the memory holds about a third.
        let (job, info) = submit_with(&server, &mut client, r#""retain_seconds": 0"#).await;
        eventually("it writes", async || job.status().rows > attempt as u64 * 2_000_000).await;
        let start = Instant::now();
        cancel(&mut client, info).await;
        eventually("the device is free", async || device.memory().used_bytes() == 0 && scheduler.stats().running == 0)
            .await;
        times.push(start.elapsed());
    }
    println!("cancelled while the arena grows, and free within {times:?}");
    assert!(times.iter().all(|time| *time < LATE), "it is stopped after {times:?}");
}
