//! Turns that several jobs share, and questions that share a pass.
//!
//! ```text
//!   job with the turn ── its questions ─┐                              ┌─► its result
//!   job that waits ───── its questions ─┼─► numbered rows ─► one pass ─┼─► its result
//!   job that waits ───── its questions ─┘                              └─► its result
//! ```
//!
//! A pass over a prepared join has a cost that does not depend on its rows: a GPU needs a fraction
//! of a millisecond to launch the work. Jobs with few rows would pay it one after the other, since
//! the jobs of a build side take turns. So the job with the turn takes the rows of those that wait
//! along, if they are few. A *question* is the rows of one job up to a note. Each question has a
//! number, which its rows carry through the join (`join/numbered.rs`).
//!
//! The answers are kept until the pass has ended. If it fails, the other jobs get their rows back,
//! and the job with the turn answers its own questions one by one, as it would have done without
//! the others. So no job fails because of another. The build side is not shared in this way any
//! more then, because the next pass would most likely fail as well.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::{DataType, SchemaRef, UInt32Type};
use parking_lot::Mutex;

use super::arriving::{Arrived, size};
use super::feeds::Feed;
use super::job::{Job, JobState};
use super::state::Shared;
use crate::catalog::Adopter;
use crate::engine::Prepared;
use crate::join::{BatchSink, IncomingBatches, Monitor, with_number};
use crate::memory::Arena;
use crate::{Error, Result};

/// Most rows of a pass that several questions share. With more, the pass itself takes longer than
/// its launch.
const ROWS_MAX: u64 = 1 << 16;

/// Most bytes of the rows of such a pass, and of its answers.
const BYTES_MAX: u64 = 8 << 20;

/// Rows of one job up to a note.
struct Question<'a> {
    job: &'a Job,
    arrived: &'a [Arrived],
}

impl Question<'_> {
    fn batches(&self) -> impl Iterator<Item = &RecordBatch> {
        self.arrived.iter().map(|arrived| &arrived.batch).filter(|batch| batch.num_rows() > 0)
    }

    /// Ends the answer with the note of the question, if it has one.
    fn push_note(&self) -> Result<()> {
        let note = self.arrived.last().and_then(|last| last.note.clone());
        note.map_or(Ok(()), |note| self.job.result.push_note(note))
    }
}

/// Returns the questions of a job.
fn questions<'a>(job: &'a Job, arrived: &'a [Arrived]) -> impl Iterator<Item = Question<'a>> {
    let of_job = arrived.split_inclusive(|arrived| arrived.note.is_some());
    of_job.map(move |arrived| Question { job, arrived })
}

/// Job that waits for the turn of another, with rows that were taken from its feed. They go back
/// when this is dropped without an answer.
struct Guest {
    job: Arc<Job>,
    arrived: Vec<Arrived>,
    is_answered: Cell<bool>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let Some(feed) = &self.job.feed else { return };
        let arrived = std::mem::take(&mut self.arrived);
        match self.is_answered.get() {
            true => feed.rows().joined(&arrived),
            false => feed.rows().put_back(arrived),
        }
    }
}

impl Shared {
    /// Answers the questions of the job with the turn, together with those of jobs that wait for
    /// their turn. Returns `false` if its questions must be answered one by one.
    ///
    /// # Errors
    /// The errors of the job's result.
    pub(super) fn answer_together(
        &self,
        feed: &Feed,
        job: &Job,
        arrived: &[Arrived],
        prepared: &dyn Prepared,
        monitor: &Monitor,
    ) -> Result<bool> {
        let (rows, bytes) = size(arrived);
        // An answer of this size waits for no reader.
        let bytes_max = BYTES_MAX.min(self.window_bytes() / 2);
        if !feed.resident().shares_turns() || rows > ROWS_MAX || bytes.max(feed.result_bytes(rows)) > bytes_max {
            return Ok(false);
        }
        let guests = self.take_guests(feed, (ROWS_MAX - rows, bytes_max - bytes));
        let of_guests = guests.iter().flat_map(|guest| questions(&guest.job, &guest.arrived));
        let all: Vec<Question<'_>> = questions(job, arrived).chain(of_guests).collect();
        if all.len() < 2 {
            return Ok(false);
        }
        match self.answers(feed, job, &all, prepared, monitor, bytes_max) {
            Ok(answers) => {
                self.state.lock().totals.shared_questions_total += all.len() as u64;
                self.deliver(job, &guests, &all, answers).map(|()| true)
            }
            Err(error) => {
                if job.check_stop().is_ok() {
                    tracing::debug!(%error, "questions that share a pass are answered one by one");
                    feed.resident().share_turns_no_longer();
                }
                Ok(false)
            }
        }
    }

    /// Answers the questions of a job, each in a pass of its own.
    ///
    /// # Errors
    /// Those of [`Prepared::probe`] and of the job's result.
    pub(super) fn answer_one_by_one(
        feed: &Feed,
        job: &Job,
        arrived: &[Arrived],
        prepared: &dyn Prepared,
        monitor: &Monitor,
    ) -> Result<()> {
        for question in questions(job, arrived) {
            let mut batches = question.batches().peekable();
            if batches.peek().is_some() {
                let rows = IncomingBatches::new(feed.name(), feed.schema().clone(), usize::MAX);
                batches.try_for_each(|batch| rows.push(batch.clone(), monitor.cancel()))?;
                rows.finish();
                prepared.probe(&rows, &job.host_memory, &job.result, monitor)?;
            }
            question.push_note()?;
        }
        Ok(())
    }

    /// Takes rows along of jobs that wait for the turn of this feed's build side, in the order of
    /// their turns: at most as many rows and bytes as there is `room` for.
    fn take_guests(&self, feed: &Feed, mut room: (u64, u64)) -> Vec<Guest> {
        let state = self.state.lock();
        let mut guests = Vec::new();
        for id in feed.resident().waiting() {
            let Some(job) = state.open.get(&id).map(|open| open.job.clone()) else { continue };
            // The first turn of a job is its own.
            let has_begun = job.life.lock().state == JobState::Running;
            if !has_begun || job.check_stop().is_err() || !self.may_take_a_turn(&job) {
                continue;
            }
            let Some(arrived) = job.feed.as_ref().and_then(|feed| feed.rows().take_all_within(room)) else { continue };
            let (rows, bytes) = size(&arrived);
            room = (room.0 - rows, room.1 - bytes);
            guests.push(Guest { job, arrived, is_answered: Cell::new(false) });
        }
        guests
    }

    /// Joins the rows of all questions in one pass. Returns the batches of each answer.
    fn answers(
        &self,
        feed: &Feed,
        job: &Job,
        all: &[Question<'_>],
        prepared: &dyn Prepared,
        monitor: &Monitor,
        bytes_max: u64,
    ) -> Result<Vec<Vec<RecordBatch>>> {
        let of_question = |(number, question)| Question::batches(question).map(move |batch| (number, batch));
        let numbered: Vec<(u32, &RecordBatch)> = (0..).zip(all).flat_map(of_question).collect();
        let answers = Answers {
            arena: self.catalog.arena().clone(),
            bytes_max,
            schema: job.result.schema().clone(),
            kept: Mutex::new((vec![Vec::new(); all.len()], 0)),
        };
        if !numbered.is_empty() {
            let numbers = numbered.iter().flat_map(|(number, batch)| std::iter::repeat_n(*number, batch.num_rows()));
            let numbers = self.in_arena(job, UInt32Array::from_iter_values(numbers))?;
            let schema = with_number(feed.schema());
            let rows = IncomingBatches::new(feed.name(), schema.clone(), usize::MAX).numbered();
            let mut start = 0;
            for (_, batch) in numbered {
                let count = batch.num_rows();
                let columns = batch.columns().iter().cloned().chain([numbers.slice(start, count)]).collect();
                rows.push(RecordBatch::try_new(schema.clone(), columns)?, monitor.cancel())?;
                start += count;
            }
            rows.finish();
            prepared.probe(&rows, &job.host_memory, &answers, monitor)?;
        }
        Ok(answers.kept.into_inner().0)
    }

    /// Returns numbers in memory that every device can read.
    fn in_arena(&self, job: &Job, numbers: UInt32Array) -> Result<ArrayRef> {
        let batch = RecordBatch::try_from_iter([("number", Arc::new(numbers) as ArrayRef)])?;
        let arena = self.catalog.arena().drawing_on(job.host_memory.clone());
        Ok(Adopter::new(arena).adopt(batch)?.column(0).clone())
    }

    /// Pushes the answers to the results of their jobs, each followed by the note of its question.
    fn deliver(&self, job: &Job, guests: &[Guest], all: &[Question<'_>], answers: Vec<Vec<RecordBatch>>) -> Result<()> {
        for guest in guests {
            guest.is_answered.set(true);
            guest.job.result.begin_turn();
        }
        let mut failed: BTreeMap<_, Error> = BTreeMap::new();
        for (question, batches) in all.iter().zip(answers) {
            if failed.contains_key(&question.job.id) {
                continue;
            }
            let result = &question.job.result;
            let pushed = batches.into_iter().try_for_each(|batch| result.push(batch));
            if let Err(error) = pushed.and_then(|()| question.push_note()) {
                failed.insert(question.job.id, error);
            }
        }
        for guest in guests {
            if let Some(error) = failed.remove(&guest.job.id) {
                self.stop(&guest.job, error);
            }
        }
        failed.remove(&job.id).map_or(Ok(()), Err)
    }
}

/// Answers of a pass, by number.
struct Answers {
    arena: Arena,
    bytes_max: u64,
    /// Columns of an answer, which has no number.
    schema: SchemaRef,
    /// Batches of each answer, and the bytes of all.
    kept: Mutex<(Vec<Vec<RecordBatch>>, u64)>,
}

impl BatchSink for Answers {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        let (_, mut columns, rows) = batch.into_parts();
        let numbers = columns.pop().ok_or_else(|| Error::Internal("the rows of a pass have no number".into()))?;
        let numbers = numbers.as_primitive::<UInt32Type>();
        let bytes: u64 = columns.iter().map(own_bytes).sum();
        {
            let mut kept = self.kept.lock();
            kept.1 += bytes;
            if kept.1 > self.bytes_max {
                return Err(Error::Exhausted("the answers of a shared pass are larger than expected".into()));
            }
        }
        let mut rows_of: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (row, &number) in (0..).zip(numbers.values()) {
            rows_of.entry(number).or_default().push(row);
        }
        for (number, positions) in rows_of {
            // Memory of its own, so that a slow reader holds the answers of no other job.
            let answer = match positions.len() == rows {
                true => self.batch(columns.clone(), rows)?,
                false => {
                    let (count, positions) = (positions.len(), UInt32Array::from(positions));
                    let of_answer = |column: &ArrayRef| Ok(compact(take(column, &positions, None)?));
                    let taken = columns.iter().map(of_answer).collect::<Result<_>>()?;
                    Adopter::new(self.arena.clone()).adopt(self.batch(taken, count)?)?
                }
            };
            let mut kept = self.kept.lock();
            let of_number = kept.0.get_mut(number as usize);
            of_number.ok_or_else(|| Error::Internal(format!("no question has number {number}")))?.push(answer);
        }
        Ok(())
    }
}

impl Answers {
    fn batch(&self, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        Ok(RecordBatch::try_new_with_options(self.schema.clone(), columns, &options)?)
    }
}

/// Returns the bytes that rows take, without the dictionary that they share with others.
fn own_bytes(column: &ArrayRef) -> u64 {
    let bytes = match column.data_type() {
        DataType::Dictionary(..) => column.as_any_dictionary().keys().to_data().get_slice_memory_size(),
        _ => column.to_data().get_slice_memory_size(),
    };
    // Without a size, the rows of the pass are the bound.
    bytes.unwrap_or(0) as u64
}

/// Drops text that only other rows refer to.
fn compact(column: ArrayRef) -> ArrayRef {
    match column.data_type() {
        DataType::Utf8View => Arc::new(column.as_string_view().gc()),
        DataType::BinaryView => Arc::new(column.as_binary_view().gc()),
        _ => column,
    }
}
