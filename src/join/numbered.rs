//! Rows that carry a number through a join.
//!
//! ```text
//!   rows of question 0, 1, 1, 2 ─► probe ─► joined rows of question 1, 0, 2, 1
//! ```
//!
//! Several callers may let their rows be probed in one pass. Strategies give the joined rows in any
//! order, so each row carries the number of its question: one more column of the probe side, and
//! one more column of the result. The joins with and without the number share the build side.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use super::fused::Fused;
use super::inputs::SideInput;
use super::prepared::PreparedJoin;
use super::semantics::JoinSemantics;
use super::{OutputColumn, OutputSource, Task};
use crate::catalog::Table;
use crate::columns::Role;
use crate::device::Device;
use crate::{Error, Result};

/// Bytes of a number.
const NUMBER_BYTES: f64 = 4.0;

/// Returns the columns of rows with a number of 32 bits, which is the last column.
pub fn with_number(schema: &Schema) -> SchemaRef {
    let number = Arc::new(Field::new("number", DataType::UInt32, false));
    let fields = schema.fields().iter().cloned().chain([number]);
    Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone()))
}

impl Task {
    /// Returns the task for probe rows with a number. The result has the number too if it `gives`
    /// it.
    fn numbered(&self, gives: bool) -> Self {
        let mut task = self.clone();
        let (name, schema) = (task.probe.table.name.clone(), with_number(&task.probe.table.schema));
        let index = schema.fields().len() - 1;
        task.probe.table = Arc::new(Table::unknown(name, schema, Vec::new()));
        // Each question gets rows of its own.
        task.probe.shares = false;
        task.probe.device_text.clear();
        if gives {
            let source = OutputSource::Column { side: task.probe.side, index };
            task.probe.output_columns.push(index);
            task.output.push(OutputColumn { name: "number".into(), source });
            task.schema = with_number(&task.schema);
            task.expected.row_bytes += NUMBER_BYTES;
        }
        task
    }
}

impl PreparedJoin {
    /// Returns the same join for probe rows with a number. The result has the number too if it
    /// `gives` it. The joins share the build side.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a join that marks rows of its build side, because the marks would
    /// be those of all questions, and for one that counts rows.
    pub fn numbered(&self, gives: bool, device: &dyn Device) -> Result<Self> {
        if self.flags.is_some() || self.task.counts_rows {
            return Err(Error::Unsupported("the rows of this join cannot be told apart by a number".into()));
        }
        let task = Arc::new(self.task.numbered(gives));
        let shape = SideInput::of_task(&task, Role::Probe, false);
        let fused = Fused::of(&task, &self.build, &shape, &self.layout, device);
        let semantics = JoinSemantics::new(&task, &self.build, &shape, fused);
        Ok(Self {
            layout: self.layout.clone(),
            build: self.build.clone(),
            probe_shape: Arc::new(shape),
            semantics,
            sizes: self.sizes.of_columns(&task.schema),
            built: self.built.clone(),
            flags: None,
            filter: self.filter.clone(),
            ready: self.ready.clone(),
            task,
        })
    }
}
