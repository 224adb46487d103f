//! The named suites at full size, and the axes of their figures.

use super::axes::{Columns, Keys, Payloads, ProbeKeys, Rows};
use super::suite::{Axes, Axis, Kind, Suite};
use super::tpc::Query;
use dovetail::{Error, Result};

const M: u64 = 1 << 20;

/// Foreign key to primary key, with dense keys drawn equally often: the literature's base case.
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

/// Sizes of the narrow and the wide join of Wu et al.: 2^25 to 2^27 build rows, twice as many probe
/// rows.
const WU_SIZES: Axes = Axes { rows: &[Rows::build(32 * M), Rows::build(64 * M), Rows::build(128 * M)], ..PLAIN };

/// The wide join of Wu et al. that most figures vary: 2^27 rows and two payload columns per side.
const WU_WIDE: Axes = Axes { rows: &[Rows::build(128 * M)], ratio: &[1], payloads: &[Payloads::as_key(2)], ..PLAIN };

/// Two columns of 8 bytes on each side.
const TWO_OF_8: Payloads = Payloads::both(Columns { as_key: 0, of_4: 0, of_8: 2 });

/// The join of Rui and Tu: equal rows on both sides, 4 + 4 bytes, unique keys.
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
        "Wu Fig. 11: ever smaller build sides",
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
        "Wu Fig. 13: ever fewer rows with a match",
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
        "Rui & Tu Fig. 7 to 9: in-memory joins with equally many rows on both sides",
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
        "sparse keys with ever fewer matches",
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
        about: "TPC-DS Q95: a self-join of web sales; the result has twelve times as many rows",
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

/// Figures that show the joins of another figure's suite in another way: by phase, by memory, or
/// next to other joins. Each entry is the figure and the name of that suite.
const OTHER_FIGURES: [(&str, &str); 5] =
    [("wu-9", "wu-8"), ("rui-8", "rui-7"), ("rui-9", "rui-7"), ("rui-11", "rui-10"), ("rui-12", "rui-10")];

/// Finds a suite by its name or by a figure.
///
/// # Errors
/// [`Error::Invalid`] with all names, for an unknown name.
pub fn find(name: &str) -> Result<&'static Suite> {
    let other = OTHER_FIGURES.iter().find(|(figure, _)| *figure == name).map(|(_, suite)| *suite);
    SUITES.iter().find(|suite| suite.name == other.unwrap_or(name)).ok_or_else(|| {
        let names: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        Error::Invalid(format!("there is no suite {name:?}; there are {}", names.join(", ")))
    })
}
