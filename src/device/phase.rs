//! Phase of a join that the calling thread works for, so that measurements of a device can name the
//! purpose of its work.

use std::cell::Cell;

thread_local! {
    static PHASE: Cell<&'static str> = const { Cell::new("") };
}

/// Restores the thread's previous phase on drop.
struct Outer(&'static str);

impl Drop for Outer {
    fn drop(&mut self) {
        PHASE.set(self.0);
    }
}

/// Runs `work` as part of the phase `name`.
pub fn in_phase<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    let _outer = Outer(PHASE.replace(name));
    work()
}

/// Phase that the calling thread works for. Empty: none.
#[cfg(any(dovetail_cuda, test))]
pub(super) fn current() -> &'static str {
    PHASE.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_end_with_their_work_however_it_ends() {
        assert_eq!(current(), "");
        in_phase("match", || {
            assert_eq!(in_phase("gather", current), "gather");
            assert!(crate::panics::caught(|| in_phase("expand", || panic!("on purpose"))).is_err());
            assert_eq!(current(), "match");
        });
        assert_eq!(current(), "");
    }
}
