//! Turns: threads of a test that run one at a time, in an order that a seed decides.
//!
//! ```text
//!   task 0   ──► step           ──► step    ...    a task runs to its next step,
//!   task 1          └──► step ──┘                  and then the seed draws the task that goes on
//! ```
//!
//! Steps are looks at a [cancel flag](crate::device::CancelFlag), and reads and changes of
//! [shared counters](crate::memory::SharedCounters). A task that waits for a counter sleeps. So the
//! code under test is the real one, and each run with the same seed is the same. Threads that are
//! no tasks are not affected.

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Steps after which a run counts as one that never ends.
const STEPS_MAX: u64 = 200_000;

/// Chance of a turn of a task that is awake, relative to one that sleeps.
const AWAKE: u32 = 32;

thread_local! {
    /// Task that this thread is.
    static OWN: RefCell<Option<(Arc<Turns>, usize)>> = const { RefCell::new(None) };
}

/// Decides whether a task ends at a step. Gets the number of the step and the group of the task.
type Ends = Box<dyn FnMut(u64, usize) -> bool + Send>;

/// Turns of the tasks of one run.
pub struct Turns(Mutex<State>);

struct State {
    random: StdRng,
    tasks: Vec<Task>,
    /// Task whose turn it is.
    current: Option<usize>,
    steps: u64,
    /// Hash of all turns so far.
    trace: u64,
    ends: Ends,
}

struct Task {
    group: usize,
    parent: Option<usize>,
    has_ended: bool,
    /// Chance of a turn, relative to the others. So some tasks are much slower than others.
    weight: u32,
    /// True if the task waits. Its turns are rare until another task wakes it.
    sleeps: bool,
    /// Signals that it has become the task's turn.
    has_turn: Arc<Condvar>,
}

impl Turns {
    /// Makes the turns of a run. A task panics at a step for which `ends` returns true.
    pub fn new(seed: u64, ends: impl FnMut(u64, usize) -> bool + Send + 'static) -> Arc<Self> {
        let (random, ends) = (StdRng::seed_from_u64(seed), Box::new(ends));
        Arc::new(Self(Mutex::new(State { random, tasks: Vec::new(), current: None, steps: 0, trace: 0, ends })))
    }

    /// Returns `work` as a task of a group, for a thread to run.
    pub fn task<T>(self: Arc<Self>, group: usize, work: impl FnOnce() -> T) -> impl FnOnce() -> T {
        self.add(group, None, work)
    }

    /// Gives the first turn.
    pub fn start(&self) {
        self.0.lock().pass_on();
    }

    /// Returns the number of steps so far.
    pub fn steps(&self) -> u64 {
        self.0.lock().steps
    }

    /// Returns a number that depends on the order of all turns so far.
    pub fn trace(&self) -> u64 {
        self.0.lock().trace
    }

    /// True if the run did not end, and its tasks were ended after [`STEPS_MAX`] steps.
    pub fn was_endless(&self) -> bool {
        self.steps() > STEPS_MAX
    }

    fn add<T>(self: Arc<Self>, group: usize, parent: Option<usize>, work: impl FnOnce() -> T) -> impl FnOnce() -> T {
        let number = {
            let mut state = self.0.lock();
            let weight = [1, 1, 4, 16][state.random.random_range(0..4)];
            state.tasks.push(Task { group, parent, has_ended: false, weight, sleeps: false, has_turn: Arc::default() });
            state.tasks.len() - 1
        };
        move || {
            let _end = End(self.clone(), number);
            self.wait(self.0.lock(), number);
            OWN.set(Some((self.clone(), number)));
            work()
        }
    }

    fn step(&self, number: usize) {
        let mut state = self.0.lock();
        state.steps += 1;
        let (steps, group) = (state.steps, state.tasks[number].group);
        if steps > STEPS_MAX || (state.ends)(steps, group) {
            drop(state);
            // Unlike `panic!`, this prints nothing.
            std::panic::resume_unwind(Box::new("the test ended it"));
        }
        state.pass_on();
        self.wait(state, number);
    }

    fn sleep(&self, number: usize) {
        let mut state = self.0.lock();
        state.tasks[number].sleeps = true;
        state.pass_on();
        self.wait(state, number);
    }

    fn wait(&self, mut state: MutexGuard<'_, State>, number: usize) {
        let has_turn = state.tasks[number].has_turn.clone();
        has_turn.wait_while(&mut state, |state| state.current != Some(number));
    }
}

impl State {
    /// Gives the turn to a task that the seed draws.
    fn pass_on(&mut self) {
        let weight_of = |task: &Task| match task.sleeps {
            _ if task.has_ended => 0,
            true => 1,
            false => AWAKE * task.weight,
        };
        let weights = || self.tasks.iter().map(weight_of);
        let sum: u32 = weights().sum();
        self.current = (sum > 0).then(|| {
            let mut drawn = self.random.random_range(0..sum);
            let is_drawn = |weight: u32| {
                let is_here = drawn < weight;
                drawn = drawn.wrapping_sub(weight);
                is_here
            };
            weights().position(is_drawn).expect("a number below the sum is in one of the weights")
        });
        if let Some(current) = self.current {
            self.trace = (self.trace ^ current as u64).wrapping_mul(0x0100_0000_01b3).rotate_left(7);
            self.tasks[current].sleeps = false;
            self.tasks[current].has_turn.notify_one();
        }
    }
}

/// Ends a task when it is dropped.
struct End(Arc<Turns>, usize);

impl Drop for End {
    fn drop(&mut self) {
        OWN.set(None);
        let mut state = self.0.0.lock();
        state.tasks[self.1].has_ended = true;
        state.pass_on();
    }
}

fn own() -> Option<(Arc<Turns>, usize)> {
    OWN.with_borrow(Clone::clone)
}

/// Returns work of a thread that a task starts, as a task of the same group. Other threads start
/// the work as it is.
pub fn in_turns<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let (task, work) = match own() {
        Some((turns, parent)) => {
            let group = turns.0.lock().tasks[parent].group;
            (Some(turns.add(group, Some(parent), work)), None)
        }
        None => (None, Some(work)),
    };
    move || match (task, work) {
        (Some(task), _) => task(),
        (None, work) => work.expect("work is either a task or not")(),
    }
}

/// Ends a step of a task: others have their turns. A thread that is no task goes on.
///
/// # Panics
/// If the run wants the task to end here.
pub fn step() {
    // A second panic would abort the process.
    if let Some((turns, number)) = own().filter(|_| !std::thread::panicking()) {
        turns.step(number);
    }
}

/// Lets a task sleep until it is woken or, as after a time limit, a rare turn comes. True for a
/// task. Other threads do not sleep here.
pub fn sleep() -> bool {
    let task = own();
    if let Some((turns, number)) = &task {
        turns.sleep(*number);
    }
    task.is_some()
}

/// Wakes all tasks that sleep.
pub fn wake() {
    if let Some((turns, _)) = own() {
        turns.0.lock().tasks.iter_mut().for_each(|task| task.sleeps = false);
    }
}

/// Gives others their turns until the tasks that this one has started have ended.
pub fn await_started() {
    let Some((turns, number)) = own() else { return };
    let are_left = || turns.0.lock().tasks.iter().any(|task| task.parent == Some(number) && !task.has_ended);
    while are_left() {
        turns.sleep(number);
    }
}
