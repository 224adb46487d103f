//! Options of all devices of this process, which only tests set.

use std::path::PathBuf;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

static OPTIONS: OnceLock<TestOptions> = OnceLock::new();

/// Options that only tests set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestOptions {
    /// File that requests failures of devices. Whenever it exists, the next call to which its text
    /// applies removes the file and fails as the text says. The text may begin with the name of a
    /// device: `host:1 lost`. `host/fault.rs` and `cuda/fault.rs` list the failures.
    pub fault_file: Option<PathBuf>,
    /// Logical GPUs per physical GPU, each with an equal share of its memory, for tests of several
    /// GPUs on fewer. A logical GPU in a process of its own has its own context, which errors of
    /// other logical GPUs do not reach.
    pub gpus_of_one: Option<u16>,
}

impl TestOptions {
    /// Sets the options of this process, before it opens a device. Only the first call counts.
    pub fn set(self) {
        OPTIONS.get_or_init(|| self);
    }

    /// Returns the options of this process.
    pub fn get() -> Self {
        OPTIONS.get().cloned().unwrap_or_default()
    }
}
