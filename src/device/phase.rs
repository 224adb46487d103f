//! Which phase of a join the calling thread works for, so that whoever watches a device can say what its work was for.

use std::cell::Cell;

thread_local! {
    static PHASE: Cell<&'static str> = const { Cell::new("") };
}

/// The phase that the thread goes back to.
struct Outer(&'static str);

impl Drop for Outer {
    fn drop(&mut self) {
        PHASE.set(self.0);
    }
}

/// Does `work` as part of that phase.
pub fn in_phase<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    let _outer = Outer(PHASE.replace(name));
    work()
}

/// The phase that the calling thread works for; empty for none.
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
