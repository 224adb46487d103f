//! Joins of the demo, as arguments of `dovetail join`.

/// Join of the demo.
pub struct Step {
    pub title: &'static str,
    pub why: &'static str,
    /// Arguments of `dovetail join`.
    pub words: &'static str,
}

/// All joins of the demo, in order: later joins may use tables that earlier joins keep.
pub const STEPS: [Step; 7] = [
    Step {
        title: "Every line with its order",
        why: "a foreign key and its primary key: the most common join",
        words: "orders lineitem --on o_orderkey=l_orderkey \
                --columns o_orderkey,o_orderdate,o_orderpriority,l_partkey,l_quantity,l_extendedprice",
    },
    Step {
        title: "TPC-H query 3, first join: orders of customers in the BUILDING segment",
        why: "the server keeps the result as a table for the next join",
        words: "q3_customer q3_orders --on c_custkey=o_custkey \
                --columns o_orderkey,c_custkey,c_name,o_orderdate,o_shippriority --into q3_customer_orders",
    },
    Step {
        title: "TPC-H query 3, second join: their lines that are not yet shipped",
        why: "one side is the result of the first join; all devices run this join together",
        words: "q3_customer_orders q3_lineitem --on o_orderkey=l_orderkey --devices all \
                --columns o_orderkey,o_orderdate,o_shippriority,l_extendedprice,l_discount",
    },
    Step {
        title: "Customers without orders",
        why: "a left anti join: rows of one side without a match on the other",
        words: "customer orders --on c_custkey=o_custkey --how left_anti \
                --columns c_custkey,c_name,c_phone,c_acctbal,c_mktsegment",
    },
    Step {
        title: "Customers and suppliers of the same nation",
        why: "many to many: only 25 keys, so the result is far larger than the input",
        words: "customer supplier --on c_nationkey=s_nationkey --columns c_nationkey,c_custkey,c_name,s_suppkey,s_name",
    },
    Step {
        title: "Every line with the cost of its part from its supplier",
        why: "a key of two columns",
        words: "partsupp lineitem --on ps_partkey=l_partkey,ps_suppkey=l_suppkey \
                --columns l_orderkey,l_linenumber,ps_partkey,ps_suppkey,ps_supplycost,l_extendedprice",
    },
    Step {
        title: "Orders with the desk of their clerk",
        why: "a string key",
        words: "clerks orders --on clerk=o_clerk --columns o_orderkey,o_orderdate,clerk,desk,o_totalprice",
    },
];
