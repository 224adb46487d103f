//! The named suites: which cases each has, at full size, and what it is drawn over.

use serde_json::{Value, json};

use super::axes::{Columns, Keys, Payloads, ProbeKeys, Rows, parse_key_bytes, parse_key_columns, parse_share};
use super::case::Case;
use super::choices;
use super::sequence::Sequence;
use super::tpc::{Query, TpcJoin};
use super::workload::Workload;
use crate::{Error, Result};

const M: u64 = 1 << 20;

/// What varies between the cases of a suite; the command line replaces what it names.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Synthetic joins: what replaces the suite's own")]
pub struct AxisArgs {
    /// Rows of the build side, or of both sides as BUILD:PROBE; K, M and G are binary. These are not scaled
    #[arg(long, value_delimiter = ',')]
    pub rows: Vec<Rows>,

    /// Rows of the probe side for each of the build side, where --rows does not say
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub ratio: Vec<u64>,

    /// What keys look like: dense, sparse (hashed over the whole range), multiples (of 2^16), text
    #[arg(long, value_delimiter = ',')]
    pub keys: Vec<Keys>,

    /// Columns that make up the key
    #[arg(long, value_delimiter = ',', value_parser = parse_key_columns)]
    pub key_columns: Vec<usize>,

    /// Bytes of each key column: 4, 8
    #[arg(long, value_delimiter = ',', value_parser = parse_key_bytes)]
    pub key_bytes: Vec<usize>,

    /// Payload columns of each side: 2 (as wide as the key), 2x4+1x8 (by their bytes), 1x4/7x8 (build side / probe side)
    #[arg(long, value_delimiter = ',')]
    pub payloads: Vec<Payloads>,

    /// Share of probe rows that have a partner
    #[arg(long, value_delimiter = ',', value_parser = parse_share)]
    pub match_ratio: Vec<f64>,

    /// Build rows with the same key
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    pub copies: Vec<u64>,

    /// How the probe side draws its keys: each (as often as any other), uniform (at random), zipf:EXPONENT
    #[arg(long, value_delimiter = ',')]
    pub probe_keys: Vec<ProbeKeys>,

    /// Share of rows whose key is null, on both sides
    #[arg(long, value_delimiter = ',', value_parser = parse_share)]
    pub nulls: Vec<f64>,
}

/// No suite is made smaller than this by itself.
const SCALE_MIN: f64 = 1.0 / 65536.0;

/// How large, and how random.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Part of the suite's own sizes.
    pub scale: f64,
    /// Everything random follows from it.
    pub seed: u64,
    /// Cases of a suite that draws them.
    pub cases: usize,
}

/// A named set of cases.
#[derive(Debug)]
pub struct Suite {
    /// What it is called.
    pub name: &'static str,
    /// What it reproduces, or varies, in a line.
    pub about: &'static str,
    /// What its figure is drawn over.
    pub axis: Axis,
    /// Memory that the device has, at full size; `None`: what the command line or the machine gives.
    pub device_memory: Option<u64>,
    /// Its cases.
    kind: Kind,
}

/// The axis of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// The field of a line of results.
    pub field: &'static str,
    /// What stands at the axis.
    pub label: &'static str,
}

#[derive(Debug)]
enum Kind {
    Synthetic(Axes),
    Sequences { joins: &'static [usize], fact: u64, dimension: u64 },
    Tpc { queries: &'static [Query], key_bytes: &'static [usize] },
    Choices,
}

/// All combinations are cases.
#[derive(Clone, Copy, Debug)]
struct Axes {
    rows: &'static [Rows],
    ratio: &'static [u64],
    keys: &'static [Keys],
    key_columns: &'static [usize],
    key_bytes: &'static [usize],
    payloads: &'static [Payloads],
    match_ratio: &'static [f64],
    copies: &'static [u64],
    probe_keys: &'static [ProbeKeys],
    nulls: &'static [f64],
}

/// Foreign key to primary key, dense keys, each drawn as often as any other: where the literature starts from.
const PLAIN: Axes = Axes {
    rows: &[Rows::build(64 * M)],
    ratio: &[2],
    keys: &[Keys::Dense],
    key_columns: &[1],
    key_bytes: &[4],
    payloads: &[Payloads::as_key(1)],
    match_ratio: &[1.0],
    copies: &[1],
    probe_keys: &[ProbeKeys::Each],
    nulls: &[0.0],
};

/// The narrow and the wide join of Wu et al.: 2^25 to 2^27 rows meet twice as many.
const WU_SIZES: Axes = Axes { rows: &[Rows::build(32 * M), Rows::build(64 * M), Rows::build(128 * M)], ..PLAIN };

/// The wide join of Wu et al. that most figures vary: 2^27 rows each, two payload columns each.
const WU_WIDE: Axes = Axes { rows: &[Rows::build(128 * M)], ratio: &[1], payloads: &[Payloads::as_key(2)], ..PLAIN };

/// Two columns of 8 bytes on each side.
const TWO_OF_8: Payloads = Payloads::both(Columns { as_key: 0, of_4: 0, of_8: 2 });

/// The join of Rui and Tu: as many rows on both sides, 4 + 4 bytes, unique keys.
const RUI: Axes = Axes { rows: &[Rows::build(64 * M)], ratio: &[1], ..PLAIN };

const BUILD_ROWS: Axis = Axis { field: "build_rows", label: "|R| (rows)" };
const RATIO: Axis = Axis { field: "ratio", label: "|S| / |R|" };
const COLUMNS: Axis = Axis { field: "payload_columns", label: "payload columns per side" };
const MATCHES: Axis = Axis { field: "match_ratio", label: "match ratio" };
const ZIPF: Axis = Axis { field: "zipf", label: "Zipf factor" };
const TYPES: Axis = Axis { field: "types", label: "bytes of key + payloads" };
const COPIES: Axis = Axis { field: "copies", label: "build rows per key" };
const JOIN: Axis = Axis { field: "query", label: "join" };

/// All suites.
pub static SUITES: [Suite; 25] = [
    synthetic(
        "wu-7",
        "Wu Fig. 7, Table 4: gathering in and out of order; see its phases",
        BUILD_ROWS,
        Axes { payloads: &[Payloads::as_key(1)], ..WU_WIDE },
    ),
    synthetic("wu-8", "Wu Fig. 8, 9: narrow join, one payload column per side, |S| = 2 |R|", BUILD_ROWS, WU_SIZES),
    synthetic(
        "wu-10",
        "Wu Fig. 10: wide join, two payload columns per side, |S| = 2 |R|",
        BUILD_ROWS,
        Axes { payloads: &[Payloads::as_key(2)], ..WU_SIZES },
    ),
    synthetic(
        "wu-11",
        "Wu Fig. 11: a smaller and smaller build side",
        RATIO,
        Axes {
            rows: &[
                Rows::both(128 * M, 128 * M),
                Rows::both(64 * M, 128 * M),
                Rows::both(32 * M, 128 * M),
                Rows::both(16 * M, 128 * M),
                Rows::both(8 * M, 128 * M),
            ],
            ..WU_WIDE
        },
    ),
    synthetic(
        "wu-12",
        "Wu Fig. 12: one to six payload columns per side",
        COLUMNS,
        Axes {
            payloads: &[
                Payloads::as_key(1),
                Payloads::as_key(2),
                Payloads::as_key(3),
                Payloads::as_key(4),
                Payloads::as_key(5),
                Payloads::as_key(6),
            ],
            ..WU_WIDE
        },
    ),
    synthetic(
        "wu-13",
        "Wu Fig. 13: fewer and fewer rows find a partner",
        MATCHES,
        Axes { match_ratio: &[1.0, 0.5, 0.25, 0.125, 0.0625], ..WU_WIDE },
    ),
    synthetic(
        "wu-14",
        "Wu Fig. 14: skewed foreign keys",
        ZIPF,
        Axes {
            probe_keys: &[
                ProbeKeys::Zipf(0.0),
                ProbeKeys::Zipf(0.25),
                ProbeKeys::Zipf(0.5),
                ProbeKeys::Zipf(0.75),
                ProbeKeys::Zipf(1.0),
                ProbeKeys::Zipf(1.25),
                ProbeKeys::Zipf(1.5),
                ProbeKeys::Zipf(1.75),
                ProbeKeys::Zipf(2.0),
            ],
            ..WU_WIDE
        },
    ),
    synthetic(
        "wu-15",
        "Wu Fig. 15, Table 5: keys and payloads of 4 and 8 bytes, and the memory they take",
        TYPES,
        Axes { key_bytes: &[4, 8], payloads: &[Payloads::as_key(2), TWO_OF_8], ..WU_WIDE },
    ),
    Suite {
        name: "wu-16",
        about: "Wu Fig. 16: one to eight joins in sequence",
        axis: Axis { field: "joins", label: "joins" },
        device_memory: None,
        kind: Kind::Sequences { joins: &[1, 2, 3, 4, 5, 6, 7, 8], fact: 128 * M, dimension: 32 * M },
    },
    Suite {
        name: "wu-17",
        about: "Wu Fig. 17, Table 6: joins of TPC-H (scale factor 10) and TPC-DS (100)",
        axis: JOIN,
        device_memory: None,
        kind: Kind::Tpc { queries: &Query::ALL, key_bytes: &[4, 8] },
    },
    synthetic(
        "rui-7",
        "Rui & Tu Fig. 7 to 9: in-memory joins of as many rows on both sides",
        BUILD_ROWS,
        Axes {
            rows: &[
                Rows::build(M),
                Rows::build(2 * M),
                Rows::build(4 * M),
                Rows::build(8 * M),
                Rows::build(16 * M),
                Rows::build(32 * M),
                Rows::build(64 * M),
                Rows::build(128 * M),
            ],
            ..RUI
        },
    ),
    synthetic(
        "rui-10",
        "Rui & Tu Fig. 10 to 12: results of up to 16 times the rows of a side",
        COPIES,
        Axes { copies: &[1, 2, 4, 8, 16], ..RUI },
    ),
    synthetic(
        "rui-13",
        "Rui & Tu Fig. 13: skewed keys",
        ZIPF,
        Axes {
            keys: &[Keys::Sparse],
            probe_keys: &[
                ProbeKeys::Zipf(0.0),
                ProbeKeys::Zipf(0.25),
                ProbeKeys::Zipf(0.5),
                ProbeKeys::Zipf(0.75),
                ProbeKeys::Zipf(1.0),
            ],
            ..RUI
        },
    ),
    Suite {
        device_memory: Some(12 << 30),
        ..synthetic(
            "rui-14",
            "Rui & Tu Fig. 14: a probe side beyond device memory, in chunks",
            Axis { field: "probe_rows", label: "|S| (rows)" },
            Axes {
                rows: &[
                    Rows::both(128 * M, 256 * M),
                    Rows::both(128 * M, 512 * M),
                    Rows::both(128 * M, 1024 * M),
                    Rows::both(128 * M, 1536 * M),
                    Rows::both(128 * M, 2560 * M),
                    Rows::both(256 * M, 256 * M),
                    Rows::both(256 * M, 1024 * M),
                    Rows::both(256 * M, 2560 * M),
                ],
                ..RUI
            },
        )
    },
    synthetic(
        "joins",
        "foreign key to primary key, keys and payloads of 4 and of 8 bytes",
        BUILD_ROWS,
        Axes { rows: &[Rows::build(M), Rows::build(8 * M), Rows::build(64 * M)], key_bytes: &[4, 8], ..PLAIN },
    ),
    synthetic(
        "keys",
        "dense, sparse, patterned and text keys",
        Axis { field: "keys", label: "keys" },
        Axes { keys: &[Keys::Dense, Keys::Sparse, Keys::Multiples, Keys::Text], key_bytes: &[8], ..PLAIN },
    ),
    synthetic(
        "sparse",
        "hashed sparse keys of 4 and 8 bytes against dense ones, two payload columns",
        TYPES,
        Axes { keys: &[Keys::Dense, Keys::Sparse], key_bytes: &[4, 8], ..WU_WIDE },
    ),
    synthetic(
        "composite",
        "keys of one, two and three columns of integers or text",
        Axis { field: "key_columns", label: "key columns" },
        Axes { keys: &[Keys::Sparse, Keys::Text], key_columns: &[1, 2, 3], ..PLAIN },
    ),
    synthetic(
        "nulls",
        "keys that are null, on both sides",
        Axis { field: "nulls", label: "share of null keys" },
        Axes { keys: &[Keys::Sparse], nulls: &[0.0, 0.1, 0.3, 0.6, 0.9], ..PLAIN },
    ),
    synthetic(
        "matches",
        "sparse keys of which fewer and fewer find a partner",
        MATCHES,
        Axes {
            keys: &[Keys::Sparse],
            match_ratio: &[1.0, 0.5, 0.25, 0.125, 0.0625, 0.01],
            probe_keys: &[ProbeKeys::Uniform],
            ..PLAIN
        },
    ),
    synthetic(
        "skew",
        "probe keys by Zipf's law, dense and sparse",
        ZIPF,
        Axes {
            keys: &[Keys::Dense, Keys::Sparse],
            probe_keys: &[
                ProbeKeys::Uniform,
                ProbeKeys::Zipf(0.5),
                ProbeKeys::Zipf(0.75),
                ProbeKeys::Zipf(1.0),
                ProbeKeys::Zipf(1.25),
                ProbeKeys::Zipf(1.5),
                ProbeKeys::Zipf(1.75),
            ],
            ..PLAIN
        },
    ),
    synthetic(
        "duplicates",
        "build keys repeat: results grow beyond the probe side",
        COPIES,
        Axes { rows: &[Rows::build(4 * M)], keys: &[Keys::Sparse], copies: &[1, 4, 16, 64], ..PLAIN },
    ),
    synthetic(
        "payloads",
        "up to sixteen payload columns per side, of 4 and of 8 bytes",
        Axis { field: "payloads", label: "payload columns per side (columns x bytes)" },
        Axes {
            rows: &[Rows::build(32 * M)],
            payloads: &[
                Payloads::as_key(0),
                Payloads::as_key(1),
                Payloads::as_key(4),
                Payloads::as_key(8),
                Payloads::as_key(16),
                Payloads::both(Columns { as_key: 0, of_4: 8, of_8: 8 }),
            ],
            ..PLAIN
        },
    ),
    Suite {
        name: "q95",
        about: "TPC-DS Q95: web sales with themselves, twelve times as many rows, all of them written",
        axis: JOIN,
        device_memory: None,
        kind: Kind::Tpc { queries: &[Query::J5], key_bytes: &[4, 8] },
    },
    Suite {
        name: "choices",
        about: "joins drawn at random: how often the planner's choice is within 10 % of the best strategy",
        axis: Axis { field: "bytes_in", label: "bytes of both tables" },
        device_memory: None,
        kind: Kind::Choices,
    },
];

const fn synthetic(name: &'static str, about: &'static str, axis: Axis, axes: Axes) -> Suite {
    Suite { name, about, axis, device_memory: None, kind: Kind::Synthetic(axes) }
}

/// The suite of that name.
///
/// # Errors
/// [`Error::Invalid`] with all names.
pub fn find(name: &str) -> Result<&'static Suite> {
    SUITES.iter().find(|suite| suite.name == name).ok_or_else(|| {
        let names: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        Error::Invalid(format!("there is no suite {name:?}; there are {}", names.join(", ")))
    })
}

impl Suite {
    /// Its cases; what the command line says of the axes replaces the suite's own.
    ///
    /// # Errors
    /// [`Error::Invalid`] when axes are said of a suite that has none.
    pub fn cases(&self, args: &AxisArgs, size: Size) -> Result<Vec<Case>> {
        let Size { scale, seed, cases } = size;
        let scaled = |rows: u64| Rows::build(rows).scaled(scale).build;
        match &self.kind {
            Kind::Synthetic(axes) => Ok(axes.workloads(args, scale, seed).into_iter().map(Case::Synthetic).collect()),
            _ if !args.is_empty() => Err(Error::Invalid(format!(
                "the joins of suite {} are fixed, but for --scale; leave out what says how synthetic joins look",
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

    /// The largest power of two up to 1 at which no case has more bytes than that.
    ///
    /// # Errors
    /// As [`cases`](Self::cases).
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

    /// Whether it asks how good the planner's choices are.
    pub fn is_of_choices(&self) -> bool {
        matches!(self.kind, Kind::Choices)
    }

    /// The axis, for a line of results.
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
    /// All combinations, without those that come out the same.
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

/// Each workload with each value of an axis.
fn vary<T: Copy>(all: &mut Vec<Workload>, values: &[T], set: impl Fn(&mut Workload, T)) {
    let with = |workload: Workload| {
        values
            .iter()
            .map(|&value| {
                let mut varied = workload.clone();
                set(&mut varied, value);
                varied
            })
            .collect::<Vec<_>>()
    };
    *all = std::mem::take(all).into_iter().flat_map(with).collect();
}
