//! Tests of questions of several streams that share a pass.

use arrow::array::AsArray;
use arrow::datatypes::Int32Type;
use bytes::Bytes;
use futures::executor::block_on;

use super::real::start_with;
use super::*;
use crate::catalog::ResultReader;
use crate::join::Side;
use crate::planner::Strategy;
use crate::testing::wait_until;

/// Streams that join a table with rows that arrive.
struct Streams {
    scheduler: Scheduler,
    jobs: Vec<Arc<Job>>,
    readers: Vec<ResultReader>,
}

impl Streams {
    /// Opens streams of a join with rows like those of `s`. Each has had its first turn.
    fn open(left: Table, strategy: Strategy, count: usize) -> Self {
        let (scheduler, _, catalog) = start_with(1, SchedulerOptions::default());
        let spec = JoinSpec {
            columns: vec!["right.k".into(), "s0".into()],
            ..JoinSpec::inner(left.name.as_str(), "s", vec![KeyPair::new("k", "k")])
        };
        catalog.create(left).unwrap();
        let open = |_| {
            let options = JobOptions {
                streamed: Some(Side::Right),
                retain_seconds: Some(0),
                strategy: Some(strategy),
                ..JobOptions::default()
            };
            let arriving = Table::to_arrive("stream", table("s").schema, 1 << 20, 44);
            let spec = JoinSpec { right: Arc::new(arriving).into(), ..spec.clone() };
            submit(&scheduler, &catalog, &spec, options, "a").unwrap()
        };
        let jobs: Vec<Arc<Job>> = (0..count).map(open).collect();
        let readers = jobs.iter().map(|job| job.result.reader(0, 1)).collect();
        let streams = Self { scheduler, jobs, readers };
        streams.settle();
        streams
    }

    /// Waits until each stream has had all its turns.
    fn settle(&self) {
        let shared = &self.scheduler.handle.shared;
        wait_until("all turns", || {
            let state = shared.state.lock();
            let has_had = |job: &Arc<Job>| state.open.contains_key(&job.id) && !shared.wants_a_turn(job);
            self.jobs.iter().all(has_had)
        });
    }

    /// Keeps the turn from all streams. Returns the end of that.
    fn keep_turn(&self) -> impl FnOnce() + use<> {
        const OTHER: JobId = JobId(u64::MAX);
        let scheduler = self.scheduler.clone();
        let resident = scheduler.handle.shared.state.lock().residents[0].clone();
        assert!(resident.begin_turn(OTHER, Duration::ZERO));
        move || {
            resident.end_turn(OTHER);
            scheduler.tick(SystemTime::now());
        }
    }

    /// Asks questions, each of a stream, while no turn can begin. So the first stream has the turn,
    /// and the others wait for it.
    fn ask_at_once(&self, questions: &[(usize, RecordBatch)]) {
        let end = self.keep_turn();
        for (at, (stream, rows)) in questions.iter().enumerate() {
            block_on(self.scheduler.feed(&self.jobs[*stream], rows.clone(), Some(note(at)))).unwrap();
        }
        end();
        self.settle();
    }

    /// Takes the next answer of a stream: its keys, ascending, and its note.
    fn answer(&mut self, stream: usize) -> (Vec<i32>, Bytes) {
        let mut keys = Vec::new();
        loop {
            let (batch, note) = block_on(self.readers[stream].next_noted()).unwrap().unwrap();
            keys.extend_from_slice(batch.column(0).as_primitive::<Int32Type>().values());
            if let Some(note) = note {
                keys.sort_unstable();
                return (keys, note);
            }
        }
    }

    fn shared(&self) -> u64 {
        self.scheduler.stats().shared_questions_total
    }
}

fn note(at: usize) -> Bytes {
    Bytes::from(format!("question {at}"))
}

fn rows(keys: impl Iterator<Item = i32>) -> RecordBatch {
    table_with("s", keys).batches[0].clone()
}

#[test]
fn questions_of_waiting_streams_share_a_pass_and_get_their_own_answers() {
    for strategy in Strategy::ALL {
        let mut streams = Streams::open(rows_of("t", 1000), strategy, 5);
        // The last question of each stream has no rows with a match, or no rows at all.
        let asked: Vec<(usize, Range<i32>)> =
            vec![(0, 0..1), (1, 5..300), (2, 7..8), (3, 0..1000), (1, 3..4), (4, 2000..2100), (2, 9..9)];
        let questions: Vec<_> = asked.iter().map(|(stream, keys)| (*stream, rows(keys.clone()))).collect();
        streams.ask_at_once(&questions);
        for (at, (stream, keys)) in asked.into_iter().enumerate() {
            let expected: Vec<i32> = keys.filter(|&key| key < 1000).collect();
            assert_eq!(streams.answer(stream), (expected, note(at)), "question {at} by {strategy}");
        }
        assert_eq!(streams.shared(), 7, "{strategy}");
        // All streams go on alone.
        for stream in 0..5 {
            streams.ask_at_once(&[(stream, rows(3..5))]);
            assert_eq!(streams.answer(stream), (vec![3, 4], note(0)));
        }
        assert_eq!(streams.shared(), 7, "{strategy}");
        streams.jobs.iter().for_each(|job| streams.scheduler.end_rows(job).unwrap());
        assert!(streams.scheduler.wait_idle(PATIENCE));
        assert!(streams.jobs.iter().all(|job| job.state() == JobState::Complete));
    }
}

#[test]
fn a_stream_with_many_rows_is_not_taken_along() {
    let mut streams = Streams::open(rows_of("t", 1000), Strategy::Hash, 3);
    let many = || rows((0..70_000).map(|at| at % 2000));
    streams.ask_at_once(&[(0, rows(0..2)), (1, many()), (2, rows(4..6))]);
    assert_eq!(streams.answer(0), (vec![0, 1], note(0)));
    assert_eq!(streams.answer(1).0.len(), 35_000);
    assert_eq!(streams.answer(2), (vec![4, 5], note(2)));
    assert_eq!(streams.shared(), 2);
    streams.ask_at_once(&[(1, many()), (0, rows(0..2)), (2, rows(4..6))]);
    assert_eq!((streams.answer(1).0.len(), streams.answer(0).0, streams.answer(2).0), (35_000, vec![0, 1], vec![4, 5]));
    assert_eq!(streams.shared(), 4, "the other two share the turn after the first");
}

#[test]
fn questions_whose_answers_are_too_large_together_are_answered_one_by_one() {
    // One key has most of the rows, which no plan for unknown rows expects.
    let keys = (0..5_000).chain(std::iter::repeat_n(5_000, 40_000));
    let mut streams = Streams::open(table_with("t", keys), Strategy::Hash, 3);
    let heavy = || rows(std::iter::repeat_n(5_000, 10));
    for _ in 0..2 {
        streams.ask_at_once(&[(0, heavy()), (1, rows(1..3)), (2, heavy())]);
        let answers = [streams.answer(0), streams.answer(1), streams.answer(2)];
        assert_eq!(answers.each_ref().map(|(keys, _)| keys.len()), [400_000, 2, 400_000]);
        assert_eq!(answers.map(|(_, note)| note), [note(0), note(1), note(2)]);
    }
    assert_eq!(streams.shared(), 0);
}

#[test]
fn a_stream_that_is_cancelled_gets_nothing_and_disturbs_no_other() {
    let mut streams = Streams::open(rows_of("t", 1000), Strategy::Hash, 3);
    for cancelled in [0, 1] {
        let end = streams.keep_turn();
        for stream in cancelled..3 {
            let asked = streams.scheduler.feed(&streams.jobs[stream], rows(0..10), Some(note(stream)));
            block_on(asked).unwrap();
        }
        streams.scheduler.cancel(streams.jobs[cancelled].id).unwrap();
        end();
        for stream in cancelled + 1..3 {
            assert_eq!(streams.answer(stream), ((0..10).collect(), note(stream)));
        }
        assert_eq!(streams.jobs[cancelled].state(), JobState::Cancelled);
    }
}

#[test]
fn a_job_that_gets_the_turn_before_others_waits_for_it_no_longer() {
    let streams = Streams::open(rows_of("t", 1000), Strategy::Hash, 3);
    let resident = streams.scheduler.handle.shared.state.lock().residents[0].clone();
    let [a, b, c] = [0, 1, 2].map(|stream: usize| streams.jobs[stream].id);
    let begin = |job: JobId| resident.begin_turn(job, Duration::ZERO);
    assert_eq!([a, b, c].map(begin), [true, false, false]);
    resident.end_turn(a);
    assert!(begin(c));
    assert_eq!(resident.waiting(), [b]);
    resident.end_turn(c);
    assert!(begin(b));
    assert!(resident.waiting().is_empty());
    resident.end_turn(b);
}
