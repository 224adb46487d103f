//! Joins of TPC-H and TPC-DS queries on data of the benchmarks' own generators (Wu et al. 2024,
//! section 5.3, Table 6).
//!
//! | | query | build side | probe side | rows (M) |
//! |---|---|---|---|---|
//! | J1 | H Q7 | orders: nation | lines: supplier, date, price, discount | 15, 18.2, 18.2 |
//! | J2 | H Q18 | orders: customer, date, price | lines: quantity | 15, 60, 60 |
//! | J3 | H Q19 | part: brand, container, size | lines: quantity, price, discount | 2, 2.1, 2.1 |
//! | J4 | DS Q64 | demographics: marital status | store sales: 3 keys, 7 others | 1.9, 58, 58 |
//! | J5 | DS Q95 | web sales: warehouse | web sales: warehouse | 72, 72, 904 |
//!
//! The rows are the published rows of the build side, the probe side and the result, in millions.
//! J1 takes the lines (`lineitem`) shipped in two years, and J3 those shipped by air and delivered
//! in person. The demographics of J4 are the customers'.
//!
//! The published joins use TPC-H at scale factor 10 and TPC-DS at 100. Our joins multiply both
//! scale factors by a scale. As in the paper, text is coded as numbers, keys have 4 or 8 bytes,
//! other columns have 8, and rows are shuffled. Only the columns that a join needs are kept. Three
//! things differ from the queries:
//!
//! * The nation of J1 is derived from the customer's number.
//! * The probe side of J4 is the first store sales with a demography, as many as in the query's
//!   plan. Its codes for year, store name and zip are derived from date and store.
//! * A scaled J4 scales both sides, so the sales' demographies are folded into the existing ones.

use arrow::array::RecordBatch;
use rayon::prelude::*;
use serde_json::{Value, json};
use tpcdsgen::config::{Session, SessionBuilder, Table};
use tpcdsgen::row::{CustomerDemographicsRowGenerator, StoreSalesRowGenerator, WebSalesRowGenerator};
use tpchgen::generators::{LineItem, LineItemGenerator, Order, OrderGenerator, Part, PartGenerator};

use super::check::{Join, Prepared, Summary, Term};
use super::random::Permutation;
use super::workload::{ROWS_PER_BATCH, integers};
use dovetail::{Error, Result};

/// Parts of a table that are generated in parallel.
const PARTS: u64 = 64;

/// Nations of TPC-H.
const NATIONS: i64 = 25;

/// Ship dates of J1's lines in days since 1970: 1995-01-01 to 1996-12-31.
const Q7_DAYS: std::ops::RangeInclusive<i64> = 9131..=9861;

/// Rows of J4 at full scale.
const Q64_DEMOGRAPHICS: u64 = 1_920_800;
const Q64_SALES: u64 = 57_898_426;

/// Orders of `web_sales` at full scale.
const Q95_ORDERS: u64 = 6_000_000;

/// Columns of J4's probe side, including the key.
const Q64_SALE_COLUMNS: usize = 11;

/// Lines with a demography per ticket of `store_sales`, a low estimate. A ticket has 12 lines on
/// average, and some lack a demography.
const Q64_SALES_PER_TICKET: u64 = 11;

/// One of the five joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// TPC-H Q7.
    J1,
    /// TPC-H Q18.
    J2,
    /// TPC-H Q19.
    J3,
    /// TPC-DS Q64.
    J4,
    /// TPC-DS Q95.
    J5,
}

/// One join on data of a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TpcJoin {
    pub query: Query,
    /// Bytes of keys; other columns have 8.
    pub key_bytes: usize,
    /// Fraction of the published scale.
    pub scale: f64,
    /// Seed of the order of the rows.
    pub seed: u64,
}

/// A generated side: its rows, with the key first, and the kind of each other column.
struct Relation {
    /// Values in row order.
    values: Vec<i64>,
    /// True for each column after the first that is a key of some table.
    is_key: &'static [bool],
}

const KEY: bool = true;
const OTHER: bool = false;

impl Query {
    /// All queries.
    pub const ALL: [Self; 5] = [Self::J1, Self::J2, Self::J3, Self::J4, Self::J5];

    /// Returns the paper's name of the join, and its query.
    fn name(self) -> &'static str {
        match self {
            Self::J1 => "J1 (TPC-H Q7)",
            Self::J2 => "J2 (TPC-H Q18)",
            Self::J3 => "J3 (TPC-H Q19)",
            Self::J4 => "J4 (TPC-DS Q64)",
            Self::J5 => "J5 (TPC-DS Q95)",
        }
    }

    /// Returns the published rows of build side, probe side and result.
    pub fn rows(self) -> [u64; 3] {
        match self {
            Self::J1 => [15_000_000, 18_200_000, 18_200_000],
            Self::J2 => [15_000_000, 59_986_052, 59_986_052],
            Self::J3 => [2_000_000, 2_100_000, 2_100_000],
            Self::J4 => [Q64_DEMOGRAPHICS, Q64_SALES, Q64_SALES],
            Self::J5 => [72_001_237, 72_001_237, 904_010_989],
        }
    }

    fn columns(self) -> [&'static [bool]; 2] {
        match self {
            Self::J1 => [&[OTHER], &[KEY, OTHER, OTHER, OTHER]],
            Self::J2 => [&[KEY, OTHER, OTHER], &[OTHER]],
            Self::J3 => [&[OTHER; 3], &[OTHER; 3]],
            Self::J4 => [&[OTHER], &[KEY, KEY, KEY, OTHER, OTHER, OTHER, OTHER, OTHER, OTHER, OTHER]],
            Self::J5 => [&[OTHER], &[OTHER]],
        }
    }
}

impl Relation {
    fn width(&self) -> usize {
        self.is_key.len() + 1
    }

    fn rows(&self) -> std::slice::ChunksExact<'_, i64> {
        self.values.chunks_exact(self.width())
    }
}

impl TpcJoin {
    /// Returns the bytes of both tables and the result.
    pub fn bytes(&self) -> u64 {
        let ([key, build, probe], [.., rows]) = (self.row_bytes(), self.query.rows());
        self.table_bytes() + (rows as f64 * (key + build + probe) as f64 * self.scale) as u64
    }

    /// Returns the bytes of both tables.
    pub fn table_bytes(&self) -> u64 {
        let ([key, build, probe], [build_rows, probe_rows, _]) = (self.row_bytes(), self.query.rows());
        ((build_rows * (key + build) + probe_rows * (key + probe)) as f64 * self.scale) as u64
    }

    /// Returns the bytes per row: of the key, and of the other columns of each side.
    fn row_bytes(&self) -> [u64; 3] {
        let key = self.key_bytes as u64;
        let of = |columns: &[bool]| columns.iter().map(|is_key| if *is_key { key } else { 8 }).sum();
        let [build, probe] = self.query.columns().map(of);
        [key, build, probe]
    }

    /// Describes the join, without its sizes.
    pub fn label(&self) -> String {
        format!("{}, keys of {} B", self.query.name(), self.key_bytes)
    }

    /// Returns the axes, for a line of results.
    pub fn axes(&self) -> Vec<(&'static str, Value)> {
        let query = format!("{:?}", self.query);
        let types = format!("keys of {} B", self.key_bytes);
        vec![("query", json!(query)), ("types", json!(types)), ("seed", json!(self.seed))]
    }

    /// Generates both sides, on all threads.
    ///
    /// # Errors
    /// [`Error::Internal`] when a generator refuses.
    pub fn prepare(&self) -> Result<Prepared> {
        let [build, probe] = self.relations()?;
        let terms = Term::all(1, build.is_key.len(), probe.is_key.len());
        let expected = expect(&build, &probe, &terms)?;
        let tables = vec![("build".into(), self.table(&build, "b", 1)?), ("probe".into(), self.table(&probe, "p", 2)?)];
        let products = terms.into_iter().map(Term::product).collect();
        Ok(Prepared { tables, joins: vec![Join::of_two(1)], products, expected })
    }

    fn relations(&self) -> Result<[Relation; 2]> {
        let [build, probe] = self.query.columns();
        let scale = 10.0 * self.scale;
        let orders = |part| OrderGenerator::new(scale, part, PARTS as i32);
        let lines = |part| LineItemGenerator::new(scale, part, PARTS as i32);
        let parts = |part| PartGenerator::new(scale, part, PARTS as i32);
        let sides = match self.query {
            Query::J1 => {
                let nation = |order: Order<'_>| [order.o_orderkey, order.o_custkey % NATIONS];
                let line = |line: LineItem<'_>| {
                    let day = i64::from(line.l_shipdate.to_unix_epoch());
                    let (price, discount) = (line.l_extendedprice.into_inner(), line.l_discount.into_inner());
                    Q7_DAYS.contains(&day).then_some([line.l_orderkey, line.l_suppkey, day, price, discount])
                };
                [
                    in_parts(|part| orders(part).iter().map(nation).collect()),
                    in_parts(|part| lines(part).iter().filter_map(line).collect()),
                ]
            }
            Query::J2 => {
                let order = |order: Order<'_>| {
                    let (day, price) = (order.o_orderdate.to_unix_epoch(), order.o_totalprice.into_inner());
                    [order.o_orderkey, order.o_custkey, i64::from(day), price]
                };
                let line = |line: LineItem<'_>| [line.l_orderkey, line.l_quantity];
                [
                    in_parts(|part| orders(part).iter().map(order).collect()),
                    in_parts(|part| lines(part).iter().map(line).collect()),
                ]
            }
            Query::J3 => {
                let part = |part: Part<'_>| {
                    let (brand, container) = (code(&part.p_brand.to_string()), code(part.p_container));
                    [part.p_partkey, brand, container, i64::from(part.p_size)]
                };
                let line = |line: LineItem<'_>| {
                    let (price, discount) = (line.l_extendedprice.into_inner(), line.l_discount.into_inner());
                    // The generator makes only one of the query's two ship modes.
                    let wanted = line.l_shipmode == "AIR" && line.l_shipinstruct == "DELIVER IN PERSON";
                    wanted.then_some([line.l_partkey, line.l_quantity, price, discount])
                };
                [
                    in_parts(|at| parts(at).iter().map(part).collect()),
                    in_parts(|part| lines(part).iter().filter_map(line).collect()),
                ]
            }
            Query::J4 => self.demographics_and_store_sales()?,
            Query::J5 => {
                let sales = self.web_sales()?;
                [sales.clone(), sales]
            }
        };
        if sides.iter().any(Vec::is_empty) {
            return Err(Error::Invalid(format!("{} has no rows at scale {}", self.query.name(), self.scale)));
        }
        let [build_values, probe_values] = sides;
        Ok([Relation { values: build_values, is_key: build }, Relation { values: probe_values, is_key: probe }])
    }

    fn scaled(&self, rows: u64) -> u64 {
        ((rows as f64 * self.scale).round() as u64).max(1)
    }

    fn session(&self) -> Result<Session> {
        // Below scale factor 1, TPC-DS tables do not shrink in proportion, so we take a part of a
        // larger table.
        let session = SessionBuilder::new().with_scale_factor((100.0 * self.scale).max(1.0)).build();
        session.map_err(|error| Error::Internal(format!("the TPC-DS generator refuses scale {}: {error}", self.scale)))
    }

    /// Generates order number and warehouse of web sales.
    fn web_sales(&self) -> Result<Vec<i64>> {
        let session = self.session()?;
        let orders = session.get_scaling().get_row_count(Table::WebSales).min(self.scaled(Q95_ORDERS));
        Ok(in_ranges(orders, |first, last| {
            let mut generator = WebSalesRowGenerator::new(session.clone(), orders);
            generator.set_source_row_range(first, last);
            generator.map(|sale| [sale.get_ws_order_number(), sale.get_ws_warehouse_sk().max(0)]).collect()
        }))
    }

    fn demographics_and_store_sales(&self) -> Result<[Vec<i64>; 2]> {
        /// The null bit of `ss_cdemo_sk`, the fifth column.
        const NO_DEMOGRAPHY: i64 = 1 << 4;
        /// Days in a year, for a code of the year. Dates are numbered from 1900.
        const DAYS: i64 = 365;
        let session = self.session()?;
        let (known, wanted) = (self.scaled(Q64_DEMOGRAPHICS).min(Q64_DEMOGRAPHICS), self.scaled(Q64_SALES));
        let demographics = in_ranges(known, |first, last| {
            let mut generator = CustomerDemographicsRowGenerator::new(session.clone(), known);
            generator.set_source_row_range(first, last);
            generator.map(|row| [row.get_cd_demo_sk(), code(row.get_cd_marital_status())]).collect()
        });
        let all = session.get_scaling().get_row_count(Table::StoreSales);
        let tickets = wanted.div_ceil(Q64_SALES_PER_TICKET).clamp(1, all);
        let mut sales = in_ranges(tickets, |first, last| {
            let mut generator = StoreSalesRowGenerator::new(session.clone(), tickets);
            generator.set_source_row_range(first, last);
            let known_sales = generator.filter(|sale| sale.null_bit_map() & NO_DEMOGRAPHY == 0);
            known_sales
                .map(|sale| {
                    let (pricing, store) = (sale.get_ss_pricing(), sale.get_ss_sold_store_sk());
                    [
                        1 + (sale.get_ss_sold_cdemo_sk() - 1).rem_euclid(known as i64),
                        sale.get_ss_sold_customer_sk(),
                        sale.get_ss_sold_addr_sk(),
                        sale.get_ss_sold_item_sk(),
                        sale.get_ss_ticket_number(),
                        pricing.get_wholesale_cost().get_number(),
                        pricing.get_list_price().get_number(),
                        pricing.get_coupon_amount().get_number(),
                        sale.get_ss_sold_date_sk() / DAYS,
                        store,
                        store / 2,
                    ]
                })
                .collect()
        });
        sales.truncate(wanted as usize * Q64_SALE_COLUMNS);
        Ok([demographics, sales])
    }

    fn table(&self, relation: &Relation, side: &str, salt: u64) -> Result<Vec<RecordBatch>> {
        let rows = relation.rows().len() as u64;
        let order = Permutation::new(rows, self.seed ^ salt);
        let starts: Vec<u64> = (0..rows).step_by(ROWS_PER_BATCH as usize).collect();
        let batch = |start: u64| {
            let places: Vec<usize> =
                (start..rows.min(start + ROWS_PER_BATCH)).map(|row| order.at(row) as usize).collect();
            let column = |at: usize, is_key: bool| {
                let width = if is_key { self.key_bytes } else { 8 };
                integers(width, places.iter().map(|&place| relation.values[place * relation.width() + at]))
            };
            let payloads =
                relation.is_key.iter().enumerate().map(|(at, is_key)| (format!("{side}{at}"), column(at + 1, *is_key)));
            Ok(RecordBatch::try_from_iter([("k0".to_owned(), column(0, true))].into_iter().chain(payloads))?)
        };
        starts.into_par_iter().map(batch).collect()
    }
}

/// Computes rows and checksum of the join by arrays indexed by key. Keys of both benchmarks are
/// dense enough.
fn expect(build: &Relation, probe: &Relation, terms: &[Term]) -> Result<Summary> {
    /// Maximum range of keys, exclusive.
    const EXTENT_MAX: i64 = 1 << 31;
    let keys = build.rows().map(|row| row[0]);
    let (min, max) = keys.fold((i64::MAX, i64::MIN), |(min, max), key| (min.min(key), max.max(key)));
    if max - min >= EXTENT_MAX {
        return Err(Error::Internal(format!("keys from {min} to {max} are too far apart to be counted")));
    }
    let over_partners = |value: &dyn Fn(&[i64]) -> u64| {
        let mut sums = vec![0u64; (max - min + 1) as usize];
        for row in build.rows() {
            let sum = &mut sums[(row[0] - min) as usize];
            *sum = sum.wrapping_add(value(row));
        }
        sums
    };
    let partners = over_partners(&|_| 1);
    let of_key = |sums: &[u64], key: i64| {
        let index = usize::try_from(key.wrapping_sub(min)).ok();
        index.and_then(|index| sums.get(index)).copied().unwrap_or(0)
    };
    let rows = probe.values.par_chunks_exact(probe.width()).map(|row| of_key(&partners, row[0])).sum();
    let mut expected = Summary { rows, checksum: 0 };
    for term in terms {
        let sums = term.build.map(|at| over_partners(&|row| row[at + 1] as u64));
        let sums = sums.as_ref().unwrap_or(&partners);
        let product = |row: &[i64]| {
            let key = term.key.map_or(1, |_| row[0] as u64);
            let probe = term.probe.map_or(1, |at| row[at + 1] as u64);
            of_key(sums, row[0]).wrapping_mul(key).wrapping_mul(probe)
        };
        let checksum = probe.values.par_chunks_exact(probe.width()).map(product).reduce(|| 0, u64::wrapping_add);
        expected.checksum = expected.checksum.wrapping_add(checksum);
    }
    Ok(expected)
}

/// Maps a text with few distinct values to a number, the same everywhere.
fn code(text: &str) -> i64 {
    text.bytes().fold(0, |code, byte| (code * 31 + i64::from(byte)) % 1_000_003)
}

/// Generates the rows of all parts in parallel, in order. Parts are numbered from 1.
fn in_parts<const COLUMNS: usize>(rows: impl Fn(i32) -> Vec<[i64; COLUMNS]> + Sync + Send) -> Vec<i64> {
    (1..=PARTS as i32).into_par_iter().flat_map_iter(rows).collect::<Vec<_>>().into_flattened()
}

/// Generates the rows of source rows 1 to `count` in parallel, in order.
fn in_ranges<const COLUMNS: usize>(
    count: u64,
    rows: impl Fn(u64, u64) -> Vec<[i64; COLUMNS]> + Sync + Send,
) -> Vec<i64> {
    let bound = |part: u64| count * part / PARTS;
    let of_part = |part: u64| match bound(part) < bound(part + 1) {
        true => rows(bound(part) + 1, bound(part + 1)),
        false => Vec::new(),
    };
    (0..PARTS).into_par_iter().flat_map_iter(of_part).collect::<Vec<_>>().into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_counts_are_the_published_ones_times_the_scale() {
        let scale = 1.0 / 512.0;
        for query in Query::ALL {
            let prepared = TpcJoin { query, key_bytes: 4, scale, seed: 1 }.prepare().unwrap();
            let [build, probe] = prepared.rows();
            for (rows, published) in [build, probe, prepared.expected.rows].into_iter().zip(query.rows()) {
                let expected = published as f64 * scale;
                assert!((rows as f64 - expected).abs() < 0.05 * expected, "{query:?}: {rows} rows, not {expected:.0}");
            }
        }
    }
}
