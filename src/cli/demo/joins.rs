//! The joins of the demo, and how many rows each must have.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::count::{self, Counted};

/// One join.
pub struct Step {
    /// What it is, in a line.
    pub title: &'static str,
    /// Why it is here.
    pub why: &'static str,
    /// The command, as any client would send it.
    pub command: Value,
    /// The columns that are counted, each with its table before it.
    pub counted: &'static [(&'static str, &'static str)],
    /// Rows that it must have, by an independent count of these.
    pub expected: fn(&Counted<'_>) -> u64,
}

/// All of them, in order: later ones may use tables that earlier ones keep.
pub fn steps() -> Vec<Step> {
    vec![
        Step {
            title: "Every line with its order",
            why: "a foreign key meets its primary key: the most common join there is",
            command: json!({"join": {
                "left": "orders", "right": "lineitem", "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
                "columns": ["o_orderkey", "o_orderdate", "o_orderpriority", "l_partkey", "l_quantity", "l_extendedprice"]}}),
            counted: &[("orders", "o_orderkey"), ("lineitem", "l_orderkey")],
            expected: |tables| {
                count::inner(tables.integers("orders", "o_orderkey"), tables.integers("lineitem", "l_orderkey"))
            },
        },
        Step {
            title: "TPC-H query 3, first join: orders of customers in the BUILDING segment",
            why: "the result stays on the server as a table, for the next join",
            command: json!({"join": {
                "left": "q3_customer", "right": "q3_orders", "on": [{"left": "c_custkey", "right": "o_custkey"}],
                "columns": ["o_orderkey", "c_custkey", "c_name", "o_orderdate", "o_shippriority"],
                "into": "q3_customer_orders"}}),
            counted: &[("q3_customer", "c_custkey"), ("q3_orders", "o_orderkey"), ("q3_orders", "o_custkey")],
            expected: |tables| q3_orders(tables).count() as u64,
        },
        Step {
            title: "TPC-H query 3, second join: their lines that are not shipped yet",
            why: "one side is the table that the first join kept",
            command: json!({"join": {
                "left": "q3_customer_orders", "right": "q3_lineitem",
                "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
                "columns": ["o_orderkey", "o_orderdate", "o_shippriority", "l_extendedprice", "l_discount"]}}),
            counted: &[
                ("q3_customer", "c_custkey"),
                ("q3_orders", "o_orderkey"),
                ("q3_orders", "o_custkey"),
                ("q3_lineitem", "l_orderkey"),
            ],
            expected: |tables| count::inner(q3_orders(tables), tables.integers("q3_lineitem", "l_orderkey")),
        },
        Step {
            title: "Customers without orders",
            why: "a left anti join: rows of one side that find nothing on the other",
            command: json!({"join": {
                "left": "customer", "right": "orders", "on": [{"left": "c_custkey", "right": "o_custkey"}],
                "how": "left_anti", "columns": ["c_custkey", "c_name", "c_phone", "c_acctbal", "c_mktsegment"]}}),
            counted: &[("customer", "c_custkey"), ("orders", "o_custkey")],
            expected: |tables| {
                count::left_anti(tables.integers("customer", "c_custkey"), tables.integers("orders", "o_custkey"))
            },
        },
        Step {
            title: "Customers and suppliers of the same nation",
            why: "many to many: 25 keys only, so the result is far larger than what goes in",
            command: json!({"join": {
                "left": "customer", "right": "supplier", "on": [{"left": "c_nationkey", "right": "s_nationkey"}],
                "columns": ["c_nationkey", "c_custkey", "c_name", "s_suppkey", "s_name"]}}),
            counted: &[("customer", "c_nationkey"), ("supplier", "s_nationkey")],
            expected: |tables| {
                count::inner(tables.integers("customer", "c_nationkey"), tables.integers("supplier", "s_nationkey"))
            },
        },
        Step {
            title: "Every line with the cost of its part from its supplier",
            why: "two columns make the key",
            command: json!({"join": {
                "left": "partsupp", "right": "lineitem",
                "on": [{"left": "ps_partkey", "right": "l_partkey"}, {"left": "ps_suppkey", "right": "l_suppkey"}],
                "columns": ["l_orderkey", "l_linenumber", "ps_partkey", "ps_suppkey", "ps_supplycost", "l_extendedprice"]}}),
            counted: &[
                ("partsupp", "ps_partkey"),
                ("partsupp", "ps_suppkey"),
                ("lineitem", "l_partkey"),
                ("lineitem", "l_suppkey"),
            ],
            expected: |tables| {
                count::inner(
                    tables.integer_pairs("partsupp", "ps_partkey", "ps_suppkey"),
                    tables.integer_pairs("lineitem", "l_partkey", "l_suppkey"),
                )
            },
        },
        Step {
            title: "Orders with the desk of their clerk",
            why: "the key is a string",
            command: json!({"join": {
                "left": "clerks", "right": "orders", "on": [{"left": "clerk", "right": "o_clerk"}],
                "columns": ["o_orderkey", "o_orderdate", "clerk", "desk", "o_totalprice"]}}),
            counted: &[("clerks", "clerk"), ("orders", "o_clerk")],
            expected: |tables| count::inner(tables.strings("clerks", "clerk"), tables.strings("orders", "o_clerk")),
        },
    ]
}

/// The keys of the orders that the first join of query 3 keeps.
fn q3_orders(tables: &Counted<'_>) -> impl Iterator<Item = i64> {
    let customers: HashSet<i64> = tables.integers("q3_customer", "c_custkey").collect();
    let orders = tables.integer_pairs("q3_orders", "o_orderkey", "o_custkey");
    orders.filter(move |(_, customer)| customers.contains(customer)).map(|(order, _)| order)
}

#[cfg(test)]
mod tests {
    use crate::cli::demo::tables::Tables;
    use crate::cli::progress::Progress;

    use super::*;

    /// What a progress bar is told: it ends where it was said that it would.
    #[test]
    fn counting_is_told_from_its_start_to_its_end() {
        let tables = Tables::generate(0.01, &Progress::of("generating", None)).unwrap();
        for step in steps() {
            let progress = Progress::transfer("counting", Some(count::bytes(&tables, step.counted)));
            let rows = (step.expected)(&Counted::new(&tables, &progress));
            assert!(rows > 0, "{}", step.title);
            assert_eq!(progress.moved_bytes(), count::bytes(&tables, step.counted), "{}", step.title);
            assert_eq!(progress.done(), Some(1.0), "{}", step.title);
        }
    }
}
