//! A suite: the axes along which its cases vary, and their changes by the command line.

use serde_json::{Value, json};

use super::axes::{Keys, Payloads, ProbeKeys, Rows, parse_key_bytes, parse_key_columns, parse_share};
use super::case::Case;
use super::choices;
use super::sequence::Sequence;
use super::tpc::{Query, TpcJoin};
use super::workload::Workload;
use dovetail::{Error, Result};

/// Minimum scale that a suite chooses without `--scale`.
const SCALE_MIN: f64 = 1.0 / 65536.0;

/// What varies between the cases of a suite; the command line replaces what it names.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Synthetic joins: values that replace those of the suite")]
pub struct AxisArgs {
    /// Rows of the build side, or of both sides as BUILD:PROBE. K, M and G are powers of 1024.
    /// --scale does not apply to them
    #[arg(long, value_delimiter = ',')]
    pub rows: Vec<Rows>,

    /// Rows of the probe side per row of the build side, unless --rows gives both
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub ratio: Vec<u64>,

    /// Keys: dense, sparse (hashed over the whole range), multiples (of 2^16), or text (of 20
    /// bytes)
    #[arg(long, value_delimiter = ',')]
    pub keys: Vec<Keys>,

    /// Number of key columns
    #[arg(long, value_delimiter = ',', value_parser = parse_key_columns)]
    pub key_columns: Vec<usize>,

    /// Bytes of each key column: 4 or 8
    #[arg(long, value_delimiter = ',', value_parser = parse_key_bytes)]
    pub key_bytes: Vec<usize>,

    /// Payload columns of each side: 2 (as wide as the key), 2x4+1x8 (number x bytes), or 1x4/7x8
    /// (build side / probe side)
    #[arg(long, value_delimiter = ',')]
    pub payloads: Vec<Payloads>,

    /// Share of probe rows that have a match, 0 to 1
    #[arg(long, value_delimiter = ',', value_parser = parse_share)]
    pub match_ratio: Vec<f64>,

    /// Number of build rows per key
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    pub copies: Vec<u64>,

    /// Distribution of the probe keys: each (all equally often), uniform (at random), or
    /// zipf:EXPONENT
    #[arg(long, value_delimiter = ',')]
    pub probe_keys: Vec<ProbeKeys>,

    /// Share of rows on both sides whose key is null, 0 to 1
    #[arg(long, value_delimiter = ',', value_parser = parse_share)]
    pub nulls: Vec<f64>,
}

/// The size and the seed of a suite's cases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Fraction of the suite's sizes.
    pub scale: f64,
    pub seed: u64,
    /// Number of cases, for a suite that draws them.
    pub cases: usize,
}

/// A named set of cases.
#[derive(Debug)]
pub struct Suite {
    /// Name on the command line.
    pub name: &'static str,
    pub about: &'static str,
    pub axis: Axis,
    /// At full size. `None`: as given by the command line or the machine.
    pub device_memory: Option<u64>,
    /// Source of the cases.
    pub kind: Kind,
}

/// The axis of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Field of a line of results.
    pub field: &'static str,
    pub label: &'static str,
}

/// The source of a suite's cases.
#[derive(Debug)]
pub enum Kind {
    /// All combinations of axes.
    Synthetic(Axes),
    Sequences {
        /// Number of joins of each case.
        joins: &'static [usize],
        /// Rows of the fact table.
        fact: u64,
        /// Rows of each dimension.
        dimension: u64,
    },
    /// Joins of TPC-H and TPC-DS, with keys of each of these widths.
    Tpc { queries: &'static [Query], key_bytes: &'static [usize] },
    /// Synthetic joins drawn at random.
    Choices,
}

/// Values of each axis. All combinations are cases. [`Workload`] describes the axes.
#[derive(Clone, Copy, Debug)]
pub struct Axes {
    /// Rows of both sides, or of the build side.
    pub rows: &'static [Rows],
    /// Probe rows for each build row, if `rows` has the build side only.
    pub ratio: &'static [u64],
    /// This and the later axes have the meaning of the fields of [`Workload`].
    pub keys: &'static [Keys],
    pub key_columns: &'static [usize],
    pub key_bytes: &'static [usize],
    pub payloads: &'static [Payloads],
    pub match_ratio: &'static [f64],
    pub copies: &'static [u64],
    pub probe_keys: &'static [ProbeKeys],
    pub nulls: &'static [f64],
}

impl Suite {
    /// Returns the cases. Axes given on the command line replace the suite's.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the command line gives axes for a suite that has none.
    pub fn cases(&self, args: &AxisArgs, size: Size) -> Result<Vec<Case>> {
        let Size { scale, seed, cases } = size;
        let scaled = |rows: u64| Rows::build(rows).scaled(scale).build;
        match &self.kind {
            Kind::Synthetic(axes) => Ok(axes.workloads(args, scale, seed).into_iter().map(Case::Synthetic).collect()),
            _ if !args.is_empty() => Err(Error::Invalid(format!(
                "the joins of suite {} are fixed, except for --scale; remove the options of synthetic joins",
                self.name
            ))),
            Kind::Sequences { joins, fact, dimension } => {
                let (fact_rows, dimension_rows) = (scaled(*fact), scaled(*dimension));
                let sequence = |&joins: &usize| Case::Sequence(Sequence { joins, fact_rows, dimension_rows, seed });
                Ok(joins.iter().map(sequence).collect())
            }
            Kind::Tpc { queries, key_bytes } => {
                let of_width = |&key_bytes: &usize| {
                    queries.iter().map(move |&query| Case::Tpc(TpcJoin { query, key_bytes, scale, seed }))
                };
                Ok(key_bytes.iter().flat_map(of_width).collect())
            }
            Kind::Choices => Ok(choices::draw(cases, scale, seed).into_iter().map(Case::Synthetic).collect()),
        }
    }

    /// Returns the largest power of two up to 1 at which no case has more than `bytes_max` bytes.
    ///
    /// # Errors
    /// Errors of [`cases`](Self::cases).
    pub fn fitting_scale(&self, args: &AxisArgs, seed: u64, bytes_max: u64) -> Result<f64> {
        let mut scale = 1.0;
        while scale > SCALE_MIN {
            let largest = match self.kind {
                Kind::Choices => choices::bytes_max(scale),
                _ => {
                    let cases = self.cases(args, Size { scale, seed, cases: 0 })?;
                    cases.iter().map(Case::bytes).max().unwrap_or(0)
                }
            };
            if largest <= bytes_max {
                break;
            }
            scale /= 2.0;
        }
        Ok(scale)
    }

    /// True if the suite measures the quality of the planner's choices.
    pub fn is_of_choices(&self) -> bool {
        matches!(self.kind, Kind::Choices)
    }

    /// Returns the axis, for a line of results.
    pub fn axis(&self) -> Value {
        json!({"field": self.axis.field, "label": self.axis.label})
    }
}

impl AxisArgs {
    fn is_empty(&self) -> bool {
        let Self { rows, ratio, keys, key_columns, key_bytes, payloads, match_ratio, copies, probe_keys, nulls } = self;
        let counts = [rows.len(), ratio.len(), keys.len(), key_columns.len(), key_bytes.len(), payloads.len()];
        counts.into_iter().chain([match_ratio.len(), copies.len(), probe_keys.len(), nulls.len()]).all(|len| len == 0)
    }
}

impl Axes {
    /// Returns all combinations, without duplicates.
    fn workloads(&self, args: &AxisArgs, scale: f64, seed: u64) -> Vec<Workload> {
        fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
            if given.is_empty() { default.to_vec() } else { given.to_vec() }
        }
        let rows = match args.rows.is_empty() {
            true => self.rows.iter().map(|rows| rows.scaled(scale)).collect(),
            false => args.rows.clone(),
        };
        let mut all = vec![Workload {
            keys: Keys::Dense,
            key_columns: 1,
            key_bytes: 4,
            build_rows: 1,
            probe_rows: 1,
            payloads: Payloads::as_key(1),
            match_ratio: 1.0,
            copies: 1,
            probe_keys: ProbeKeys::Each,
            nulls: 0.0,
            seed,
        }];
        vary(&mut all, &or(&args.key_bytes, self.key_bytes), |workload, bytes| workload.key_bytes = bytes);
        let ratios = or(&args.ratio, self.ratio);
        let sides = rows.into_iter().flat_map(|rows| match rows.probe {
            Some(probe) => vec![(rows.build, probe)],
            None => ratios.iter().map(|ratio| (rows.build, rows.build * ratio)).collect(),
        });
        vary(&mut all, &sides.collect::<Vec<_>>(), |workload, (build, probe)| {
            (workload.build_rows, workload.probe_rows) = (build, probe);
        });
        vary(&mut all, &or(&args.keys, self.keys), |workload, keys| workload.keys = keys);
        vary(&mut all, &or(&args.key_columns, self.key_columns), |workload, columns| workload.key_columns = columns);
        vary(&mut all, &or(&args.payloads, self.payloads), |workload, payloads| {
            workload.payloads = payloads.resolved(workload.key_bytes);
        });
        vary(&mut all, &or(&args.match_ratio, self.match_ratio), |workload, ratio| workload.match_ratio = ratio);
        vary(&mut all, &or(&args.copies, self.copies), |workload, copies| workload.copies = copies);
        vary(&mut all, &or(&args.probe_keys, self.probe_keys), |workload, keys| workload.probe_keys = keys);
        vary(&mut all, &or(&args.nulls, self.nulls), |workload, nulls| workload.nulls = nulls);
        let mut different: Vec<Workload> = Vec::with_capacity(all.len());
        for workload in all {
            if !different.contains(&workload) {
                different.push(workload);
            }
        }
        different
    }
}

/// Combines each item with each value of an axis.
pub fn vary<A: Clone, T: Copy>(all: &mut Vec<A>, values: &[T], set: impl Fn(&mut A, T)) {
    let with = |item: A| {
        values
            .iter()
            .map(|&value| {
                let mut varied = item.clone();
                set(&mut varied, value);
                varied
            })
            .collect::<Vec<_>>()
    };
    *all = std::mem::take(all).into_iter().flat_map(with).collect();
}
