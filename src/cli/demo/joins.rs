//! The joins of the demo, and how many rows each must have.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::count;
use super::tables::Tables;

/// One join.
pub struct Step {
    /// What it is, in a line.
    pub title: &'static str,
    /// Why it is here.
    pub why: &'static str,
    /// The command, as any client would send it.
    pub command: Value,
    /// Rows that it must have, by an independent count.
    pub expected: fn(&Tables) -> u64,
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
            expected: |tables| {
                let (orders, lines) = (tables.get("orders"), tables.get("lineitem"));
                count::inner(count::integers(orders, "o_orderkey"), count::integers(lines, "l_orderkey"))
            },
        },
        Step {
            title: "TPC-H query 3, first join: orders of customers in the BUILDING segment",
            why: "the result stays on the server as a table, for the next join",
            command: json!({"join": {
                "left": "q3_customer", "right": "q3_orders", "on": [{"left": "c_custkey", "right": "o_custkey"}],
                "columns": ["o_orderkey", "c_custkey", "c_name", "o_orderdate", "o_shippriority"],
                "into": "q3_customer_orders"}}),
            expected: |tables| q3_orders(tables).len() as u64,
        },
        Step {
            title: "TPC-H query 3, second join: their lines that are not shipped yet",
            why: "one side is the table that the first join kept",
            command: json!({"join": {
                "left": "q3_customer_orders", "right": "q3_lineitem",
                "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
                "columns": ["o_orderkey", "o_orderdate", "o_shippriority", "l_extendedprice", "l_discount"]}}),
            expected: |tables| {
                let lines = count::integers(tables.get("q3_lineitem"), "l_orderkey");
                count::inner(q3_orders(tables), lines)
            },
        },
        Step {
            title: "Customers without orders",
            why: "a left anti join: rows of one side that find nothing on the other",
            command: json!({"join": {
                "left": "customer", "right": "orders", "on": [{"left": "c_custkey", "right": "o_custkey"}],
                "how": "left_anti", "columns": ["c_custkey", "c_name", "c_phone", "c_acctbal", "c_mktsegment"]}}),
            expected: |tables| {
                let (customers, orders) = (tables.get("customer"), tables.get("orders"));
                count::left_anti(count::integers(customers, "c_custkey"), count::integers(orders, "o_custkey"))
            },
        },
        Step {
            title: "Customers and suppliers of the same nation",
            why: "many to many: 25 keys only, so the result is far larger than what goes in",
            command: json!({"join": {
                "left": "customer", "right": "supplier", "on": [{"left": "c_nationkey", "right": "s_nationkey"}],
                "columns": ["c_nationkey", "c_custkey", "c_name", "s_suppkey", "s_name"]}}),
            expected: |tables| {
                let (customers, suppliers) = (tables.get("customer"), tables.get("supplier"));
                count::inner(count::integers(customers, "c_nationkey"), count::integers(suppliers, "s_nationkey"))
            },
        },
        Step {
            title: "Every line with the cost of its part from its supplier",
            why: "two columns make the key",
            command: json!({"join": {
                "left": "partsupp", "right": "lineitem",
                "on": [{"left": "ps_partkey", "right": "l_partkey"}, {"left": "ps_suppkey", "right": "l_suppkey"}],
                "columns": ["l_orderkey", "l_linenumber", "ps_partkey", "ps_suppkey", "ps_supplycost", "l_extendedprice"]}}),
            expected: |tables| {
                let (costs, lines) = (tables.get("partsupp"), tables.get("lineitem"));
                count::inner(
                    count::integer_pairs(costs, "ps_partkey", "ps_suppkey"),
                    count::integer_pairs(lines, "l_partkey", "l_suppkey"),
                )
            },
        },
        Step {
            title: "Orders with the desk of their clerk",
            why: "the key is a string",
            command: json!({"join": {
                "left": "clerks", "right": "orders", "on": [{"left": "clerk", "right": "o_clerk"}],
                "columns": ["o_orderkey", "o_orderdate", "clerk", "desk", "o_totalprice"]}}),
            expected: |tables| {
                let (clerks, orders) = (tables.get("clerks"), tables.get("orders"));
                count::inner(count::strings(clerks, "clerk"), count::strings(orders, "o_clerk"))
            },
        },
    ]
}

/// The keys of the orders that the first join of query 3 keeps.
fn q3_orders(tables: &Tables) -> Vec<i64> {
    let customers: HashSet<i64> = count::integers(tables.get("q3_customer"), "c_custkey").into_iter().collect();
    let orders = count::integer_pairs(tables.get("q3_orders"), "o_orderkey", "o_custkey");
    orders.into_iter().filter(|(_, customer)| customers.contains(customer)).map(|(order, _)| order).collect()
}
