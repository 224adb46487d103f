//! Converts a plan to a task.

use std::collections::BTreeSet;

use super::Plan;
use crate::Result;
use crate::catalog::Value;
use crate::columns::Role;
use crate::device::{Phase, Which};
use crate::join::{Expected, Side, StageSeconds, Task, TaskSide, Then};

impl Plan {
    /// Returns the task of this plan, as the `join` room runs it.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a type that cannot be a key. Binding has
    /// refused such types before.
    pub fn task(&self) -> Result<Task> {
        let join = &self.join;
        Ok(Task {
            how: join.how,
            build: self.task_side(Role::Build),
            probe: self.task_side(Role::Probe),
            keys: join.keys.clone(),
            key_facts: join.key_facts(self.composition.build_side)?,
            output: join.output.clone(),
            counts_rows: join.counts_rows,
            schema: join.schema.clone(),
            then: match &join.then {
                None => None,
                Some(then) => Some(Then {
                    first_schema: then.first_schema.clone(),
                    joins: self.then.iter().map(Self::task).collect::<Result<_>>()?,
                    columns: then.columns.clone(),
                }),
            },
            composition: self.composition.clone(),
            dense_range: self.dense_range(),
            batch_rows: join.batch_rows,
            chunk_rows_min: None,
            expected: Expected {
                build_keys_repeat: self.estimates.repeats(self.composition.build_side),
                matches_first: self.phases.iter().any(|phase| phase.phase == Phase::Match),
                pairs_per_row: self.estimates.pairs
                    / self.estimates.keyed(self.composition.build_side.other()).max(1.0),
                // Those of the first join of a chain alone. The other tasks have their own.
                row_bytes: self.row_bytes - self.then.iter().map(|then| then.row_bytes).sum::<f64>(),
                stage_seconds: self.stage_seconds(),
            },
        })
    }

    fn task_side(&self, role: Role) -> TaskSide {
        let side = self.side(role);
        let output_columns = self.join.output_columns(side, self.composition.build_side);
        TaskSide {
            side,
            table: self.join.table(side).clone(),
            key_columns: self.key_columns(side),
            shares: self.join.may_share(side, &output_columns),
            device_text: match self.composition.device_gathers_text {
                true => self.join.device_text_columns(side, self.composition.build_side),
                false => BTreeSet::new(),
            },
            output_columns,
        }
    }

    fn key_columns(&self, side: Side) -> Vec<usize> {
        self.join.keys.iter().map(|key| key.column(side)).collect()
    }

    /// Extent of the build keys, if the plan expects a perfect-hash table.
    fn dense_range(&self) -> Option<(u128, u128)> {
        let statistics = &self.join.table(self.composition.build_side).statistics
            [self.join.keys.first()?.column(self.composition.build_side)];
        match (&statistics.min, &statistics.max) {
            // Raw keys are compared as unsigned integers, so a range that crosses zero has no dense
            // image.
            (Some(Value::Integer(min @ 0..)), Some(Value::Integer(max))) if self.composition.dense => {
                Some((*min as u128, *max as u128))
            }
            _ => None,
        }
    }

    /// Predicted seconds of each stage of the run.
    pub(super) fn stage_seconds(&self) -> StageSeconds {
        let seconds = |phases: &[Phase]| -> f64 {
            self.phases.iter().filter(|phase| phases.contains(&phase.phase)).map(|phase| phase.seconds).sum()
        };
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 };
        let rows = |role: Role| self.join.table(self.side(role)).rows as f64;
        let build_share = share(rows(Role::Build), rows(Role::Build) + rows(Role::Probe));
        let both = seconds(&[Phase::PackKeys, Phase::CopyIn]);
        let keyed = self.estimates.keyed(self.composition.build_side);
        let compared_ahead = share(keyed, keyed + self.estimates.pairs) * seconds(&[Phase::CompareKeys]);
        let matched = self.estimates.matched(self.composition.build_side);
        let kept_build_rows = match self.join.how.build_rows_kept(self.composition.build_side) {
            Some(Which::Matched) => matched,
            Some(Which::Unmatched) => rows(Role::Build) - matched,
            None => 0.0,
        };
        let kept_build = share(kept_build_rows, self.estimates.rows) * seconds(&[Phase::Gather]);
        StageSeconds {
            transform_build: build_share * both
                + seconds(&[Phase::PartitionBuild, Phase::CheckBuildOrder, Phase::SortBuild]),
            index_build: seconds(&[Phase::BuildTable, Phase::GroupBuild]) + compared_ahead,
            transform_probe: (1.0 - build_share) * both
                + seconds(&[Phase::Filter, Phase::PartitionProbe, Phase::CheckProbeOrder, Phase::SortProbe]),
            results: seconds(&[Phase::Join, Phase::Match, Phase::Expand, Phase::Gather, Phase::CompareKeys])
                - compared_ahead
                - kept_build,
            kept_build,
        }
    }
}
