//! The client commands against a server: files up, joins, files down.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, UnionFields, UnionMode};
use arrow::ipc::writer::{FileWriter, StreamWriter};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

use super::harness::{Server, begin, command, json_lines, names_in, run, send_interrupt, stderr, stdout, wait_until};

/// Writes orders and their lines. Order number `at` has `at % 3` lines.
fn write_tables(folder: &Path, orders: usize) {
    let mut text = String::from("key,name,price\n");
    for at in 0..orders {
        text.push_str(&format!("{at},\"order, {at}\",{}.5\n", at * 2));
    }
    fs::write(folder.join("orders.csv"), text).unwrap();
    let mut text = String::from("order,line\n");
    for at in 0..orders {
        for line in 0..at % 3 {
            text.push_str(&format!("{at},{line}\n"));
        }
    }
    fs::write(folder.join("lines.csv"), text).unwrap();
}

/// Returns the number of lines: 0 + 1 + 2 per three orders.
fn lines_of(orders: usize) -> u64 {
    (0..orders as u64).map(|at| at % 3).sum()
}

#[test]
fn files_of_every_format_are_uploaded_and_fetched_unchanged() {
    let server = Server::start(&[]);
    write_tables(server.path(), 10_000);
    let put = server.json(&["put", "orders.csv"]);
    assert_eq!((put[0]["table"].as_str(), put[0]["rows"].as_u64()), (Some("orders"), Some(10_000)));
    let mut from = "orders".to_owned();
    for extension in ["parquet", "arrow", "arrows", "csv"] {
        let (table, file) = (format!("copy_{extension}"), format!("copy_{extension}.{extension}"));
        let got = server.json(&["get", &from, "-o", &file]);
        assert_eq!(got[0]["rows"], 10_000, "{extension}");
        server.json(&["put", &file]);
        from = table;
    }
    // The last table has passed through all formats.
    server.ok(&["get", &from, "-o", "last.csv"]);
    let lines = |name: &str| {
        let text = fs::read_to_string(server.path().join(name)).unwrap();
        let mut lines: Vec<String> = text.lines().map(|line| line.replace('"', "")).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines("last.csv"), lines("orders.csv"));
    let leftovers: Vec<_> = fs::read_dir(server.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(leftovers.iter().all(|name| !name.to_string_lossy().ends_with(".part")), "{leftovers:?}");
}

#[test]
fn the_mode_decides_what_happens_to_an_existing_table() {
    let server = Server::start(&[]);
    write_tables(server.path(), 100);
    let rows = || server.json(&["tables"])[0]["rows"].as_u64().unwrap();
    server.ok(&["put", "orders.csv"]);
    assert!(server.fails(&["put", "orders.csv"]).contains("exists already"));
    server.ok(&["put", "orders.csv", "--mode", "append"]);
    assert_eq!(rows(), 200);
    server.ok(&["put", "orders.csv", "--mode", "replace", "--streams", "3"]);
    assert_eq!(rows(), 100);
    server.ok(&["put", "orders.csv", "orders.csv", "--table", "orders", "--mode", "append"]);
    assert_eq!(rows(), 300);
    assert!(server.fails(&["put", "lines.csv", "--table", "orders", "--mode", "append"]).contains("orders"));
    assert!(server.ok(&["drop", "orders"]).contains("300 rows"));
    assert!(server.fails(&["drop", "orders"]).contains("there is no table \"orders\""));
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let dropped = server.run(&["drop", "one", "orders", "two", "lines"]);
    assert_eq!(dropped.status.code(), Some(1));
    assert!(stdout(&dropped).starts_with("dropped orders (") && stdout(&dropped).contains("\ndropped lines ("));
    let said = stderr(&dropped);
    assert!(said.contains("\"one\"") && said.contains("\"two\"") && said.lines().count() == 2, "{said}");
    assert!(server.json(&["tables"]).is_empty());
}

#[test]
fn files_of_one_table_with_different_columns_are_refused_with_the_difference() {
    let server = Server::start(&[]);
    let write = |name: &str, text: &str| fs::write(server.path().join(name), text).unwrap();
    write("a.csv", "k,s\n1,x\n");
    for (text, expected) in [
        ("k,s\n1.5,x\n", "\"k\" is int64 there, float64 here; use --types k=float64 for both files"),
        ("k,s\n1,2\n", "\"s\" is string there, int64 here; use --types s=string for both files"),
        ("k,z\n1,x\n", "column 2 is \"s\" there, \"z\" here"),
        ("k\n1\n", "2 columns there, 1 here"),
    ] {
        write("b.csv", text);
        let said = server.fails(&["put", "a.csv", "b.csv", "--table", "t"]);
        assert_eq!(said, format!("error: b.csv does not have the columns of a.csv: {expected}\n"));
    }
    write("b.csv", "k,s\n1.5,2\n");
    let types = ["--types", "k=float64", "--types", "s=string"];
    server.ok(&[&["put", "a.csv", "b.csv", "--table", "t"][..], &types].concat());
    let twice = server.fails(&["put", "a.csv", "--types", "k=int64,s=string", "--types", "k=float64"]);
    assert!(
        twice.contains("--types gives the type int64 to column \"k\", and also float64; give only one of them"),
        "{twice}"
    );
}

/// Regression test: a column without values was treated as text, and the rows were refused.
#[test]
fn a_column_without_values_takes_its_type_from_the_table_that_is_appended_to() {
    let server = Server::start(&[]);
    let write = |name: &str, text: &str| fs::write(server.path().join(name), text).unwrap();
    let types = ["--types", "i=int16,p=decimal(9,2),t=timestamp(ns),v=string_view,s=string"];
    let append = ["--table", "t", "--mode", "append"];
    write("full.csv", "k,i,p,t,v,s\n1,2,1.25,2026-01-31,x,y\n");
    server.ok(&[&["put", "full.csv", "--table", "t"][..], &types].concat());
    write("none.csv", "k,i,p,t,v,s\n3,,,,,\n");
    let put = server.json(&[&["put", "none.csv"], &append[..]].concat());
    assert_eq!(put[0]["columns"], server.json(&["put", "full.csv", "--table", "u", types[0], types[1]])[0]["columns"]);
    // The first values may come after the rows from which `put` infers types.
    write("some.csv", "k,i,p,t,v,s\n4,,,,,\n5,7,2.5,2026-02-28 01:02:03,w,z\n");
    server.ok(&[&["put", "none.csv", "some.csv", "--infer-rows", "1"], &append[..]].concat());
    server.ok(&["put", "none.csv", "--table", "t", "--mode", "create_if_missing"]);
    let rows = server.ok(&["get", "t", "-o", "-", "--format", "csv"]);
    let lines = [
        "k,i,p,t,v,s",
        "1,2,1.25,2026-01-31T00:00:00,x,y",
        "3,,,,,",
        "3,,,,,",
        "4,,,,,",
        "5,7,2.50,2026-02-28T01:02:03,w,z",
        "3,,,,,",
    ];
    assert_eq!(rows.lines().collect::<Vec<_>>(), lines);
    // `--types` takes precedence over the table's type, and a bad value is still refused.
    let said = server.fails(&[&["put", "none.csv", "--types", "i=int64"], &append[..]].concat());
    assert!(said.contains("\"i\""), "{said}");
    write("late.csv", "k,i,p,t,v,s\n6,,,,,\n7,x,,,,\n");
    let said = server.fails(&[&["put", "late.csv", "--infer-rows", "1"], &append[..]].concat());
    assert!(said.contains("late.csv: line 3, column \"i\": \"x\" is not a valid int16; use"), "{said}");
    // In a new table, a column without values is text.
    let put = server.json(&["put", "none.csv", "--table", "new", "--mode", "create_if_missing"]);
    assert_eq!(put[0]["columns"][1], json!({ "name": "i", "type": "string" }));
    assert!(server.fails(&["put", "none.csv", "--table", "nowhere", "--mode", "append"]).contains("nowhere"));
}

#[test]
fn standard_input_becomes_a_table_and_the_inferred_csv_types_are_shown() {
    let server = Server::start(&[]);
    write_tables(server.path(), 300);
    let put = |file: &str, more: &[&str]| {
        let mut line = command();
        line.env("DOVETAIL_SERVER", &server.flight).arg("put").arg("-").args(more);
        line.stdin(fs::File::open(server.path().join(file)).unwrap()).output().unwrap()
    };
    let csv = put("orders.csv", &["--table", "piped", "--format", "csv"]);
    assert!(csv.status.success(), "{}", stderr(&csv));
    let said = stdout(&csv);
    assert!(
        said.starts_with("piped: 300 rows")
            && said.lines().nth(1).unwrap().starts_with("  key: int64, name: string, price: float64"),
        "{said}"
    );
    for file in ["o.arrows", "o.arrow", "o.parquet"] {
        server.ok(&["get", "piped", "-o", file]);
        let output = put(file, &["--table", file, "--json"]);
        assert!(output.status.success(), "{file}: {}", stderr(&output));
        let said: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!((&said["rows"], &said["columns"]), (&300.into(), &Value::Null), "{file}");
    }
    for (more, words) in [
        (&["--format", "csv"][..], "set it with --table"),
        (&["--table", "t"], "reading standard input: the input is neither Arrow IPC nor Parquet"),
        (&["-", "--table", "t"], "write - once"),
    ] {
        let refused = put("orders.csv", more);
        assert_eq!(refused.status.code(), Some(1), "{more:?}");
        assert!(stderr(&refused).contains(words), "{more:?}: {}", stderr(&refused));
    }
}

#[test]
fn rows_are_written_to_standard_output_in_the_requested_format() {
    let server = Server::start(&[]);
    write_tables(server.path(), 300);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let csv = server.ok(&["get", "orders", "-o", "-", "--format", "csv"]);
    assert_eq!(csv, fs::read_to_string(server.path().join("orders.csv")).unwrap());
    // At least one row per order, with all columns: JSON omits none.
    let left = ["join", "orders", "lines", "--on", "key=order", "--how", "left", "-o", "-", "--format", "json"];
    let rows = json_lines(&server.run(&left));
    assert_eq!(rows.len() as u64, lines_of(300) + 100);
    assert!(rows.iter().all(|row| row.as_object().unwrap().keys().eq(["key", "name", "price", "line"])));
    assert_eq!(rows.iter().filter(|row| row["line"].is_null()).count(), 100);
    // `get -o -` without `--format` writes the format that `put -` reads.
    let stream = server.run(&["get", "orders", "-o", "-"]);
    assert!(stderr(&stream).starts_with("orders: 300 rows"), "{}", stderr(&stream));
    fs::write(server.path().join("stream"), &stream.stdout).unwrap();
    assert!(server.ok(&["put", "stream", "--format", "arrow-stream"]).contains("300 rows"));
    assert!(!names_in(server.path()).contains(&"-".to_owned()));
    // The plan goes to standard error, not among the rows.
    let explained =
        server.run(&["join", "orders", "lines", "--on", "key=order", "-o", "-", "--format", "csv", "--explain"]);
    assert_eq!(stdout(&explained).lines().count() as u64, lines_of(300) + 1);
    assert!(stderr(&explained).contains("hash") || stderr(&explained).contains("sort-merge"));
    assert!(server.run(&["put", "x.json", "--format", "json"]).status.code() == Some(2), "it is not read");
}

#[test]
fn rows_of_a_file_are_joined_while_they_are_read() {
    let server = Server::start(&[]);
    write_tables(server.path(), 300);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let join = ["join", "orders", "lines", "--on", "key=order"];
    let with = |more: &[&str]| server.json(&[&join[..], more].concat());
    let sorted = |rows: Vec<Value>| {
        let mut rows: Vec<String> = rows.iter().map(Value::to_string).collect();
        rows.sort_unstable();
        rows
    };
    for how in ["inner", "left", "right_anti"] {
        let (of_table, of_file) =
            (with(&["--how", how, "--limit", "0"]), with(&["--how", how, "--limit", "0", "--probe", "lines.csv"]));
        assert_eq!(sorted(of_file), sorted(of_table), "{how}");
    }
    // From one command to the next.
    let stream = server.run(&["get", "lines", "-o", "-"]);
    let mut line = command();
    line.env("DOVETAIL_SERVER", &server.flight)
        .current_dir(server.path())
        .args(join)
        .args(["--probe", "-", "-o", "j.csv"]);
    let mut child = line.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&stream.stdout).unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(fs::read_to_string(server.path().join("j.csv")).unwrap().lines().count() as u64, lines_of(300) + 1);
    let said = server.fails(&[&join[..], &["--probe", "absent.csv"]].concat());
    assert!(said.contains("absent.csv"), "{said}");
    let said = server.fails(&["join", "absent", "lines", "--on", "key=order", "--probe", "lines.csv"]);
    assert!(said.contains("there is no table \"absent\""), "{said}");
    for more in [&["--into", "t"][..], &["--count"]] {
        let refused = server.run(&[&join[..], &["--probe", "lines.csv"], more].concat());
        assert!(stderr(&refused).contains("cannot be used with"), "{more:?}: {}", stderr(&refused));
    }
}

#[test]
fn rows_of_a_file_are_joined_with_several_tables_in_one_pass() {
    let server = Server::start(&[]);
    let write = |name: &str, text: &str| fs::write(server.path().join(name), text).unwrap();
    write("customers.csv", "id,name\n1,ann\n2,bob\n3,cid\n");
    write("parts.csv", "part,weight\n7,10\n8,20\n");
    write("shops.csv", "shop,town\n5,Ulm\n6,Bonn\n");
    write("sales.csv", "buyer,seller,part,shop,amount\n1,3,7,5,100\n2,1,8,9,200\n2,3,7,6,300\n9,1,7,6,400\n");
    server.ok(&["put", "customers.csv", "parts.csv", "shops.csv"]);
    let join = ["join", "customers", "sales", "--on", "id=buyer", "--probe", "sales.csv"];
    let all = ["--limit", "0"];
    let star = [
        "--then",
        "parts on part",
        "--then",
        "customers as sellers on id=seller",
        "--then",
        "shops on shop how right-semi",
    ];
    let mut rows = server.json(&[&join[..], &star, &all].concat());
    rows.sort_by_key(|row| row["amount"].as_u64());
    let row = |buyer, seller, place, amount, name| {
        json!({"buyer": buyer, "seller": seller, "part": 7, "shop": place, "amount": amount, "name": name,
               "weight": 10, "name_sellers": "cid"})
    };
    assert_eq!(rows, [row(1, 3, 5, 100, "ann"), row(2, 3, 6, 300, "bob")]);
    let named = ["--columns", "sellers.name,parts.weight,amount"];
    let rows = server.json(&[&join[..], &star, &named, &all].concat());
    assert_eq!(
        rows.iter().filter(|row| row["amount"] == 300).collect::<Vec<_>>(),
        [&json!({"name": "cid", "weight": 10, "amount": 300})]
    );
    // The plan of the whole pass comes after the rows.
    let explained = server.run(&[&join[..], &star, &["-o", "-", "--format", "csv", "--explain"]].concat());
    let plan = stderr(&explained);
    assert_eq!(stdout(&explained).lines().count(), 3, "{plan}");
    for words in ["\"parts\"", "\"sellers\"", "\"shops\"", "right_semi", "2 of 2"] {
        assert!(plan.contains(words), "{words}: {plan}");
    }
    for (then, words) in
        [("parts:part", "write \"TABLE on COLUMNS\""), ("parts on part how outer", "did you mean \"full\"?")]
    {
        let refused = server.run(&[&join[..], &["--then", then]].concat());
        assert!(stderr(&refused).contains(words), "{then}: {}", stderr(&refused));
    }
    for (then, words) in [
        ("customers on id=seller", "two inputs of the join are called \"customers\""),
        ("part on part", "there is no table \"part\"; did you mean \"parts\"?"),
        ("parts on weight=pard", "\"pard\""),
        ("parts on part how left", "keeps rows of table \"parts\""),
    ] {
        let said = server.fails(&[&join[..], &["--then", then]].concat());
        assert!(said.contains(words), "{then}: {said}");
    }
    let said = server.fails(&["join", "customers", "sales", "--on", "id=buyer", "--then", "parts on part"]);
    assert!(said.contains("add --probe FILE"), "{said}");
}

/// The library that writes Parquet panics on a union.
#[test]
fn a_type_that_a_format_does_not_support_is_an_error_of_one_line() {
    let server = Server::start(&[]);
    let number = Field::new("a", DataType::Int32, true);
    let column = DataType::Union(UnionFields::from_fields([number]), UnionMode::Sparse);
    let batch = RecordBatch::new_empty(Schema::new(vec![Field::new("u", column, true)]).into());
    let mut file =
        FileWriter::try_new(fs::File::create(server.path().join("u.arrow")).unwrap(), &batch.schema()).unwrap();
    file.write(&batch).unwrap();
    file.finish().unwrap();
    server.ok(&["put", "u.arrow"]);
    let said = server.fails(&["get", "u", "-o", "u.parquet"]);
    assert!(said.contains("which cannot be written as Parquet") && said.lines().count() == 1, "{said}");
    assert!(!names_in(server.path()).contains(&"u.parquet".to_owned()));
}

#[test]
fn selected_columns_of_a_table_are_written_in_the_given_order() {
    let server = Server::start(&[]);
    write_tables(server.path(), 300);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let got = server.json(&["get", "orders", "--columns", "price, key", "-o", "some.csv"]);
    assert_eq!(got[0]["rows"], 300);
    let text = fs::read_to_string(server.path().join("some.csv")).unwrap();
    assert!(text.starts_with("price,key\n0.5,0\n2.5,1\n") && text.lines().count() == 301, "{text}");
    let printed = server.json(&["get", "orders", "--columns", "name", "--limit", "1"]);
    assert_eq!(printed, [json!({ "name": "order, 0" })]);
    for (limit, said) in [("1", "this is the first row; --limit 0"), ("2", "these are the first 2 rows; --limit 0")] {
        let output = server.run(&["get", "orders", "--limit", limit]);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    let said = server.fails(&["get", "orders", "--columns", "key,name,key"]);
    assert!(said.contains("--columns names \"key\" twice; name it once"), "{said}");
    let said = server.fails(&["get", "orders", "--columns", "line"]);
    assert!(said.contains("orders has no column \"line\", which --columns names; it has key, name, price"), "{said}");
    let join = ["join", "orders", "lines", "--on", "key=order", "--columns"];
    let said = server.fails(&[&join[..], &["right.line,name,right.line"]].concat());
    assert!(said.contains("column \"right.line\" is among the columns of the join twice; name it once"), "{said}");
}

#[test]
fn uploads_respect_the_message_limit_of_the_server() {
    let server = Server::start(&["--message-limit", "64KiB"]);
    write_tables(server.path(), 100_000);
    server.ok(&["put", "orders.csv"]);
    server.ok(&["put", "orders.csv", "--mode", "replace", "--streams", "2"]);
    assert_eq!(server.json(&["tables"])[0]["rows"].as_u64(), Some(100_000));
}

/// Regression test: the command ended when its write failed. Its result stayed on the server until
/// the lease ended.
#[test]
fn a_reader_that_leaves_early_leaves_no_result_behind() {
    let server = Server::start(&[]);
    write_tables(server.path(), 3_000);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let used = || server.metric("dovetail_arena_bytes{kind=\"used\"}");
    let before = used();
    let join = ["join", "orders", "lines", "--on", "key=order"];
    for how in [
        &["--limit", "0"][..],
        &["--limit", "0", "--json"],
        &["-o", "-"],
        &["-o", "-", "--format", "csv"],
        &["-o", "-", "--format", "parquet"],
        &["-o", "j.csv"],
        &["--explain"],
    ] {
        let mut line = command();
        line.env("DOVETAIL_SERVER", &server.flight).current_dir(server.path()).args(join).args(how);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = line.stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{how:?}: {}", stderr(&output));
        assert!(!stderr(&output).contains("error"), "{how:?}: {}", stderr(&output));
        // Used memory does not show results that share the tables' columns, so the jobs are
        // checked, too. A join that is cancelled when its reader leaves has no result to release.
        let is_gone = |job: &Value| job["released"] == true || job["state"] == "cancelled";
        wait_until("the result to be released", || server.json(&["jobs"]).iter().all(is_gone));
        wait_until("the memory to be free", || used() == before);
    }
}

#[test]
fn a_table_is_shown_with_its_order_and_its_declarations() {
    let server = Server::start(&[]);
    write_tables(server.path(), 30);
    assert!(
        server
            .ok(&["put", "orders.csv", "--sorted-by", "key", "--unique", "key", "--unique", "name,price"])
            .contains(" sent in ")
    );
    let shown = server.ok(&["tables", "orders"]);
    assert!(shown.starts_with("orders: 30 rows, ") && shown.lines().next().unwrap().ends_with(" in memory"), "{shown}");
    for line in ["sorted by key", "declared unique: key", "declared unique: name, price"] {
        assert!(shown.lines().any(|shown| shown == line), "{line} is not in {shown}");
    }
    assert!(server.ok(&["tables"]).lines().next().unwrap().contains("in memory"));
}

#[test]
fn the_server_may_be_named_before_the_command() {
    let server = Server::start(&[]);
    let output = run(&["--server", &server.flight, "tables"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(run(&["--server", &server.flight, "serve"]).status.code(), Some(2), "it asks none");
}

#[test]
fn a_file_that_breaks_in_the_middle_leaves_no_table() {
    let server = Server::start(&[]);
    let mut text = String::from("k\n");
    (0..200_000).for_each(|at| text.push_str(&format!("{at}\n")));
    text.push_str("not a number\n");
    fs::write(server.path().join("broken.csv"), text).unwrap();
    for streams in ["1", "4"] {
        let said = server.fails(&["put", "broken.csv", "--streams", streams]);
        assert!(
            said.contains("broken.csv: line 200002, column \"k\": \"not a number\" is not a valid int64"),
            "{said}"
        );
        assert!(server.json(&["tables"]).is_empty());
        // The server drops the upload shortly after the command has ended.
        wait_until("the upload to be forgotten", || server.metric("dovetail_uploads_under_way") == 0.0);
    }
    assert!(server.fails(&["put", "broken.csv", "none.csv"]).contains("no such file"));
}

#[test]
fn joins_print_write_and_keep_their_rows() {
    let server = Server::start(&[]);
    write_tables(server.path(), 3_000);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let lines = lines_of(3_000);

    let shown = server.json(&["join", "orders", "lines", "--on", "key=order", "--limit", "0"]);
    assert_eq!(shown.len() as u64, lines);
    assert!(shown.iter().all(|row| row["key"].as_u64().unwrap() % 3 > row["line"].as_u64().unwrap()));

    for (how, rows) in [("left", lines + 1_000), ("left_anti", 1_000), ("left-semi", 2_000), ("right_anti", 0)] {
        let file = format!("{how}.parquet");
        let written = server.json(&["join", "orders", "lines", "--on", "key=order", "--how", how, "-o", &file]);
        assert_eq!(written[0]["rows"].as_u64(), Some(rows), "{how}");
        server.ok(&["put", &file, "--mode", "replace", "--table", "written"]);
        assert_eq!(server.json(&["tables", "written"])[0]["rows"].as_u64(), Some(rows), "{how}");
    }

    let both = ["join", "orders", "lines", "--on", "key=order", "--into", "both", "-o", "both.csv"];
    let said = server.ok(&both);
    assert!(said.ends_with("the server also keeps the rows as table both\n"), "{said}");
    server.ok(&["drop", "both"]);
    server.ok(&["join", "orders", "lines", "--on", "key=order", "--into", "joined", "--columns", "key,line"]);
    let joined = &server.json(&["tables", "joined"])[0];
    assert_eq!(joined["rows"].as_u64(), Some(lines));
    let names: Vec<_> = joined["columns"].as_array().unwrap().iter().map(|column| column["name"].clone()).collect();
    assert_eq!(names, ["key", "line"]);

    // A table is replaced only on request. A join may replace a table that it reads.
    let again = ["join", "joined", "lines", "--on", "key=order", "--how", "left_semi", "--into", "joined"];
    assert!(server.fails(&again).contains("\"joined\" exists already; use into_mode replace"));
    server.ok(&[&again[..], &["--into-mode", "replace", "--columns", "key"]].concat());
    let replaced = &server.json(&["tables", "joined"])[0];
    assert_eq!((replaced["rows"].as_u64(), replaced["columns"].as_array().unwrap().len()), (Some(lines), 1));

    let text = server.ok(&["join", "orders", "lines", "--on", "key=order", "--limit", "2"]);
    assert_eq!(text.lines().count(), 3, "{text}");
}

#[test]
fn a_join_with_a_row_limit_makes_no_further_rows() {
    let server = Server::start(&["--host-memory", "64MiB"]);
    let text: String = std::iter::once("k\n".into()).chain((0..20_000).map(|_| "1\n".to_owned())).collect();
    fs::write(server.path().join("many.csv"), text).unwrap();
    server.ok(&["put", "many.csv"]);
    // The result's 400 million rows do not fit in memory.
    let join = ["join", "many", "many", "--on", "k", "--columns", "left.k,right.k"];
    assert!(server.fails(&join).contains("--host-memory"));
    assert_eq!(server.json(&[&join[..], &["--limit", "3"]].concat()).len(), 3);
    wait_until("the job to be over", || {
        server.json(&["jobs"]).last().is_some_and(|job| job["state"] == "cancelled" && job["released"] == true)
    });
    // A result without rows is reported like any other.
    let output = server.run(&["join", "many", "many", "--on", "k", "--how", "left_anti", "--limit", "3"]);
    assert!(output.status.success() && stderr(&output).contains(": 0 rows in "), "{}", stderr(&output));
}

/// Regression test: fetched results stayed until their lease ended, and a loop of joins filled the
/// server's memory.
#[test]
fn a_result_is_released_once_it_is_fetched_unless_it_is_to_be_retained() {
    let server = Server::start(&[]);
    write_tables(server.path(), 3_000);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let used = || server.metric("dovetail_arena_bytes{kind=\"used\"}");
    let before = used();
    let join = ["join", "orders", "lines", "--on", "key=order"];
    for how in [&["-o", "j.parquet"][..], &["--limit", "3"], &["--limit", "0"], &["--explain", "--json"]] {
        server.ok(&[&join, how].concat());
        wait_until("the memory to be free", || used() == before);
    }
    assert!(server.json(&["jobs"]).iter().all(|job| job["released"] == true));
    // The result does not outlive the table made from it.
    server.ok(&[&join[..], &["--into", "joined"]].concat());
    assert!(used() > before);
    server.ok(&["drop", "joined"]);
    wait_until("the memory to be free", || used() == before);
    let output = server.run(&[&join[..], &["--retain-seconds", "300", "-o", "kept.csv"]].concat());
    let job = server.json(&["jobs"]).last().unwrap()["job"].to_string();
    let told =
        format!("keeps the result for 300 seconds after its last read; fetch it with dovetail get --job {job}\n");
    assert!(output.status.success() && stderr(&output).contains(&told), "{}", stderr(&output));
    assert_eq!(server.json(&["get", "--job", &job, "-o", "again.csv"])[0]["rows"].as_u64(), Some(lines_of(3_000)));
}

#[test]
fn an_error_of_a_join_is_one_line() {
    let server = Server::start(&[]);
    write_tables(server.path(), 10);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    for (line, expected) in [
        (&["join", "orders", "nothing", "--on", "key"][..], "there is no table \"nothing\""),
        (&["join", "orders", "lines", "--on", "key=nothing"], "\"nothing\""),
        (&["join", "orders", "lines", "--on", "name=order"], "name"),
        (&["join", "orders", "lines", "--on", "key=order", "--how", "sideways"], "sideways"),
        (&["join", "orders", "lines", "--on", "key=order", "--strategy", "magic"], "radix-hash"),
        (&["join", "orders", "lines", "--on", "key=order", "-o", "x.doc"], "x.doc"),
        (&["explain", "orders", "lines", "--on", "nothing=order"], "\"nothing\""),
        (&["join", "orders", "lines", "--on", "key=order", "--columns", "line_right"], "write \"right.line\""),
        (&["join", "orders", "lines", "--on", "key=order", "--into-mode", "replace"], "--into TABLE"),
        (&["join", "orders", "lines", "--on", "key=order", "--format", "csv"], "-o - for standard output"),
        (&["join", "orders", "lines", "--on", "key=order", "--format", "csv", "--into", "t"], "-o - for"),
        (&["get", "orders", "--format", "csv", "--limit", "2"], "-o - for standard output"),
        (&["get", "nothing"], "there is no table \"nothing\""),
        (&["get", "--job", "77"], "77"),
        (&["cancel", "77"], "77"),
    ] {
        let said = server.fails(line);
        assert!(said.starts_with("error: ") && said.contains(expected), "{line:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{line:?}: {said}");
    }
}

#[test]
fn jobs_plans_and_devices_are_shown() {
    let server = Server::start(&["--devices", "host:2"]);
    write_tables(server.path(), 1_000);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let kept = ["--retain-seconds", "300", "-o", "j.arrow"];
    server.ok(&[&["join", "orders", "lines", "--on", "key=order", "--strategy", "hash"], &kept[..]].concat());
    let jobs = server.json(&["jobs"]);
    assert_eq!(jobs.len(), 1);
    assert_eq!((jobs[0]["state"].as_str(), jobs[0]["strategy"].as_str()), (Some("complete"), Some("hash")));
    let job = jobs[0]["job"].to_string();
    assert_eq!(server.json(&["jobs", &job])[0]["job"], jobs[0]["job"]);
    let again = server.json(&["get", "--job", &job, "-o", "again.arrow"]);
    assert_eq!(again[0]["rows"].as_u64(), Some(lines_of(1_000)));

    let plan = server.json(&["explain", "orders", "lines", "--on", "key=order", "--strategy", "sort-merge"]);
    assert!(plan[0].to_string().contains("sort-merge"), "{}", plan[0]);
    assert!(server.ok(&["explain", "orders", "lines", "--on", "key=order"]).lines().count() > 1);
    let on_both = ["join", "orders", "lines", "--on", "key=order", "--devices", "all", "--into", "both"];
    assert!(server.ok(&on_both).contains(" on host:0, host:1)"));
    assert_eq!(server.json(&["jobs"])[1]["devices"], json!(["host:0", "host:1"]));
    assert!(server.ok(&["jobs"]).contains(" host:0, host:1 "));
    let devices = server.ok(&["topology"]);
    assert!(devices.contains("host:0") && devices.contains("host:1"), "{devices}");
    let picture = server.ok(&["topology", "--svg"]);
    assert!(picture.starts_with("<svg ") && picture.contains(">host:1<") && picture.ends_with("</svg>\n"), "{picture}");
    assert!(!server.run(&["topology", "--svg", "--json"]).status.success());

    server.ok(&["cancel", &job]);
    assert!(!server.run(&["get", "--job", &job, "-o", "gone.arrow"]).status.success());
}

#[test]
fn an_unwritable_file_is_refused_before_its_job_is_started() {
    let server = Server::start(&[]);
    write_tables(server.path(), 10);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    fs::create_dir(server.path().join("folder.csv")).unwrap();
    for file in ["no/such/folder.csv", "folder.csv"] {
        let said = server.fails(&["join", "orders", "lines", "--on", "key=order", "-o", file]);
        assert!(said.contains(&format!("writing {file}: ")), "{said}");
        assert!(server.fails(&["get", "orders", "-o", file]).contains(&format!("writing {file}: ")));
    }
    assert!(server.json(&["jobs"]).is_empty());
}

#[test]
fn files_with_unexpected_contents_are_named_with_what_they_contain() {
    let server = Server::start(&[]);
    let folder = server.path();
    for name in ["empty.csv", "empty.csv.gz", "empty.parquet"] {
        fs::write(folder.join(name), "").unwrap();
    }
    let column = |value: i64| Arc::new(Int64Array::from_iter_values([value])) as ArrayRef;
    let fields = vec![Field::new("k", DataType::Int64, true), Field::new("k", DataType::Int64, true)];
    let twice = RecordBatch::try_new(Schema::new(fields).into(), vec![column(1), column(2)]).unwrap();
    let create = |name: &str| fs::File::create(folder.join(name)).unwrap();
    let mut parquet = ArrowWriter::try_new(create("twice.parquet"), twice.schema(), None).unwrap();
    parquet.write(&twice).unwrap();
    parquet.close().unwrap();
    let mut stream = StreamWriter::try_new(create("twice.arrows"), &twice.schema()).unwrap();
    stream.write(&twice).unwrap();
    stream.finish().unwrap();
    fs::write(folder.join("text.parquet"), "hello").unwrap();
    fs::write(folder.join("text.arrow"), "hello, this is no table").unwrap();
    fs::write(folder.join("text.arrows"), "hello, this is no table").unwrap();
    fs::write(folder.join("notes.doc"), "hello").unwrap();
    fs::write(folder.join("wide.csv"), b"\xff\xfek\0\n\0").unwrap();
    fs::write(folder.join("packed.gz"), b"\x1f\x8b\x08").unwrap();
    fs::write(folder.join("twice.csv"), "k,k\n1,2\n").unwrap();
    fs::write(folder.join("plain.csv.gz"), "k\n1\n").unwrap();
    fs::write(folder.join("whole.csv"), "k,s\n1,x\n").unwrap();
    server.ok(&["put", "whole.csv"]);
    for file in ["cut.arrow", "cut.arrows", "cut.parquet"] {
        server.ok(&["get", "whole", "-o", file]);
        let written = fs::read(folder.join(file)).unwrap();
        fs::write(folder.join(file), &written[..written.len() - 20]).unwrap();
    }
    server.ok(&["drop", "whole"]);
    for (file, expected) in [
        ("none.csv", "there is no such file"),
        ("empty.csv", "it is empty, and a table needs columns"),
        ("empty.csv.gz", "it is empty, and a table needs columns"),
        ("empty.parquet", "it is empty, and a table needs columns"),
        ("twice.parquet", "two columns are named \"k\"; rename one, because joins refer to columns by name"),
        ("twice.arrows", "two columns are named \"k\"; rename one, because joins refer to columns by name"),
        ("text.parquet", "it is not a Parquet file"),
        ("text.arrow", "it is not an Arrow IPC file"),
        ("text.arrows", "it is not an Arrow IPC stream"),
        ("notes.doc", "the name does not show the format"),
        ("wide.csv", "line 1 is not UTF-8; convert the file first, for example with: iconv -f LATIN1 -t UTF-8 FILE"),
        ("packed.gz", "it is compressed by gzip, which only CSV may be; name it .csv.gz"),
        ("plain.csv.gz", "its name ends in .gz, but it is not gzip; rename it without .gz, or add --format"),
        ("cut.arrow", "it is cut short: it begins as an Arrow IPC file, but its end is missing"),
        ("cut.arrows", "it is cut short: it begins as an Arrow IPC stream, but its end is missing"),
        ("cut.parquet", "it is cut short: it begins as a Parquet file, but its end is missing"),
        ("twice.csv", "two columns are named \"k\"; rename one, because joins refer to columns by name"),
        (".", "it is a folder"),
    ] {
        let said = server.fails(&["put", file, "--table", "t"]);
        assert!(said.starts_with(&format!("error: reading {file}: {expected}")), "{file}: {said}");
        assert_eq!(said.lines().count(), 1, "{file}: {said}");
    }
    for (file, format, expected) in [
        ("twice.parquet", "csv", "it is a Parquet file, but --format is csv; remove --format"),
        ("twice.arrows", "parquet", "it is an Arrow IPC stream, but --format is parquet"),
    ] {
        let said = server.fails(&["put", file, "--format", format]);
        assert!(said.starts_with(&format!("error: reading {file}: {expected}")), "{file}: {said}");
    }
    // A column's name may begin with the magic bytes of a format.
    fs::write(folder.join("part.csv"), "PAR1,s\n1,x\n").unwrap();
    server.ok(&["put", "part.csv", "--format", "csv"]);
    server.ok(&["drop", "part"]);
    for more in [&["--format", "csv"][..], &[]] {
        let mut line = command();
        line.env("DOVETAIL_SERVER", &server.flight).args(["put", "-", "--table", "t"]).args(more);
        let output = line.stdin(fs::File::open(folder.join("empty.csv")).unwrap()).output().unwrap();
        let said = stderr(&output);
        assert_eq!(said, "error: reading standard input: it is empty, and a table needs columns\n", "{more:?}");
    }
    assert!(server.json(&["tables"]).is_empty());
}

#[test]
fn an_error_in_a_later_file_is_reported_before_the_upload_starts() {
    let server = Server::start(&[]);
    write_tables(server.path(), 10);
    fs::create_dir(server.path().join("other")).unwrap();
    for name in ["other/orders.csv", "tab\there.csv"] {
        fs::copy(server.path().join("lines.csv"), server.path().join(name)).unwrap();
    }
    for (files, expected) in [
        (["orders.csv", "tab\there.csv"], "cannot name a table: the table name \"tab\\there\" has a control"),
        (["orders.csv", "other/orders.csv"], "would both become table \"orders\"; use --table"),
        (["orders.csv", "none.csv"], "reading none.csv: there is no such file"),
        (["orders.csv", "other"], "reading other: it is a folder"),
    ] {
        let said = server.fails(&["put", files[0], files[1]]);
        assert!(said.contains(expected) && said.lines().count() == 1, "{files:?}: {said}");
    }
    let said = server.fails(&["put", "orders.csv", "--table", ""]);
    assert!(said.contains("--table: the table name \"\" is empty"), "{said}");
    assert!(server.json(&["tables"]).is_empty());
    server.ok(&["put", "tab\there.csv", "--table", "here"]);
}

#[test]
fn names_that_contain_separators_are_quoted() {
    let server = Server::start(&[]);
    fs::write(server.path().join("a.csv"), "\"k=1\",\"x,y\",\"say \"\"z\"\"\"\n1,2,3\n2,3,4\n").unwrap();
    fs::write(server.path().join("b.csv"), "\"k,2\",\"x,y\"\n1,9\n").unwrap();
    server.ok(&["put", "a.csv", "--sorted-by", "\"k=1\",\"x,y\"", "--unique", "\"x,y\"", "--types", "\"x,y\"=int8"]);
    server.ok(&["put", "b.csv"]);
    assert_eq!(
        server.json(&["tables", "a"])[0]["columns"][1],
        json!({"name": "x,y", "type": "int8", "nullable": true})
    );
    let columns = ["--columns", "left.\"x,y\",right.\"x,y\",\"say \"\"z\"\"\""];
    let rows = server.json(&[&["join", "a", "b", "--on", "\"k=1\"=\"k,2\""][..], &columns].concat());
    assert_eq!(rows, [json!({"x,y": 2, "x,y_right": 9, "say \"z\"": 3})]);
    let rows = server.json(&["get", "b", "--columns", "\"x,y\""]);
    assert_eq!(rows, [json!({"x,y": 9})]);
    // The command accepts the spelling that its message advises.
    fs::write(server.path().join("a.csv"), "\"x,y\"\n1\nz\n").unwrap();
    let said = server.fails(&["put", "a.csv", "--mode", "replace", "--infer-rows", "1"]);
    assert!(said.contains("use --types '\"x,y\"=string' to"), "{said}");
    server.ok(&["put", "a.csv", "--mode", "replace", "--infer-rows", "1", "--types", "\"x,y\"=string"]);
}

#[test]
fn types_are_shown_by_the_names_that_the_options_accept() {
    let server = Server::start(&[]);
    let types = "i=int16,f=float32,s=string,b=bool,d=date,p=decimal(9,2),t=timestamp,n=timestamp(ns),z=timestamp(us, UTC),h=time32(s)";
    let day = "2026-01-31";
    let text = format!("i,f,s,b,d,p,t,n,z,h\n1,1.5,x,true,{day},1.25,{day},{day},{day}T10:11:12Z,10:11:12\n");
    fs::write(server.path().join("t.csv"), text).unwrap();
    let put = &server.json(&["put", "t.csv", "--types", types])[0]["columns"];
    let told = &server.json(&["tables", "t"])[0]["columns"];
    let said = |columns: &Value| {
        let column =
            |column: &Value| format!("{}={}", column["name"].as_str().unwrap(), column["type"].as_str().unwrap());
        columns.as_array().unwrap().iter().map(column).collect::<Vec<_>>().join(",")
    };
    assert_eq!((said(put), said(told)), (types.to_owned(), types.to_owned()));
    let shown = server.ok(&["tables", "t"]);
    assert!(shown.lines().any(|line| line.starts_with("z       timestamp(us, UTC)")), "{shown}");
}

#[test]
fn a_full_disk_is_reported_in_one_sentence_with_the_file_name() {
    let server = Server::start(&[]);
    write_tables(server.path(), 50_000);
    server.ok(&["put", "orders.csv", "lines.csv"]);
    let join = ["join", "orders", "lines", "--on", "key=order"];
    for format in ["parquet", "arrow", "arrow-stream", "csv", "json"] {
        for line in [&["get", "orders"][..], &["get", "orders", "--columns", "key"], &join] {
            let line = [line, &["-o", "/dev/full", "--format", format]].concat();
            let said = server.fails(&line);
            let expected = "error: cannot write /dev/full: No space left on device\n";
            assert_eq!(said, expected, "{line:?}");
        }
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut line = command();
        line.env("DOVETAIL_SERVER", &server.flight).args(["get", "orders", "-o", "-", "--format", format]);
        let output = line.stdout(full).output().unwrap();
        let expected = "error: cannot write to standard output: No space left on device\n";
        assert_eq!((output.status.code(), &*stderr(&output)), (Some(1), expected), "{format}");
    }
}

#[test]
fn an_address_that_answers_without_a_flight_server_is_reported_as_such() {
    let server = Server::start(&[]);
    let said = server.fails(&["tables", "--server", &server.flight.replace("http:", "https:")]);
    assert!(said.contains("does not speak TLS there; write http://"), "{said}");
    let said = server.fails(&["tables", "--server", &format!("http://{}", server.admin.as_ref().unwrap())]);
    assert!(said.contains("no Flight server") && said.contains("port of metrics"), "{said}");
    // An HTTP/1.1 server answers in text and closes the connection.
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = web.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in web.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    let said = server.fails(&["tables", "--server", &format!("http://{address}")]);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.starts_with(&format!("error: there is no Flight server at http://{address}; check --server")),
        "{said}"
    );
    let said = server.fails(&["tables", "--server", "http://no-such-host.invalid"]);
    assert!(said.contains("its host cannot be found; check the name in --server"), "{said}");
}

#[test]
fn missing_files_are_named_in_plain_words() {
    let server = Server::start(&[]);
    write_tables(server.path(), 10);
    server.ok(&["put", "orders.csv"]);
    fs::create_dir(server.path().join("folder")).unwrap();
    let tls = ["tables", "--server", "https://127.0.0.1:1"];
    for (line, expected) in [
        (&["get", "orders", "-o", "none/x.csv"][..], "writing none/x.csv: there is no folder none"),
        (&["get", "orders", "-o", "folder"], "writing folder: it is a folder; give the name of a file"),
        (&["get", "orders", "-o", "orders.csv/x.csv"], "writing orders.csv/x.csv: orders.csv is a file, not a folder"),
        (
            &["get", "orders", "-o", "x.parquet", "--format", "csv"],
            "writing x.parquet: its name says parquet, but --format is csv; remove --format, or rename the file",
        ),
        (
            &["put", "."],
            "reading .: it is a folder; name the files in it, and add --table to upload them into one table",
        ),
        (
            &["put", ".."],
            "reading ..: it is a folder; name the files in it, and add --table to upload them into one table",
        ),
        (&["put", "none/x.csv"], "reading none/x.csv: there is no folder none"),
        (&["tables", "--token", "@none"], "--token names the file none, which cannot be read: there is no such file"),
        (&["tables", "--token", "@folder"], "cannot be read: it is a folder, not a file"),
        (
            &[&tls[..], &["--ca", "none.pem"]].concat(),
            "--ca names none.pem, which cannot be read: there is no such file",
        ),
        (&["serve", "--config", "none.toml"], "configuration file none.toml: there is no such file"),
        (&["serve", "--config", "folder"], "configuration file folder: it is a folder, not a file"),
        (&["serve", "--check-config", "--topology", "folder"], "cannot be read: it is a folder, not a file"),
        (&["serve", "--check-config", "--ready-file", "none/ready"], "none/ready: there is no folder none"),
    ] {
        let output = server.run(line);
        let said = stderr(&output);
        // For `serve`, an error before the server runs counts as an error of the configuration.
        assert_eq!(output.status.code(), Some(if line[0] == "serve" { 2 } else { 1 }), "{line:?}: {said}");
        assert!(said.starts_with("error: ") && said.ends_with(&format!("{expected}\n")), "{line:?}: {said}");
        assert!(!said.contains("os error"), "{said}");
    }
}

#[test]
fn a_misspelt_name_is_refused_with_the_name_that_is_meant() {
    let server = Server::start(&[]);
    write_tables(server.path(), 10);
    fs::write(server.path().join("odd.csv"), "\"a,b\",c d,K\n1,2,3\n").unwrap();
    server.ok(&["put", "orders.csv", "lines.csv", "odd.csv"]);
    for (line, expected) in [
        (&["get", "order"][..], "there is no table \"order\"; did you mean \"orders\"?"),
        (&["drop", "Lines"], "there is no table \"Lines\"; did you mean \"lines\"?"),
        (&["get", "elsewhere"], "there is no table \"elsewhere\""),
        (&["get", "odd", "--columns", "k"], "it has \"a,b\", \"c d\", K; did you mean \"K\"?"),
        (&["join", "odd", "odd", "--on", "k"], "its columns are \"a,b\", \"c d\", K; did you mean \"K\"?"),
        (&["join", "odd", "odd", "--on", "K", "--columns", "cd"], "; did you mean \"c d\"?"),
    ] {
        let said = server.fails(line);
        assert!(said.ends_with(&format!("{expected}\n")), "{line:?}: {said}");
    }
}

#[test]
fn rows_out_of_order_are_numbered_from_one() {
    let server = Server::start(&[]);
    fs::write(server.path().join("t.csv"), "k\n1\n3\n2\n").unwrap();
    let said = server.fails(&["put", "t.csv", "--sorted-by", "k"]);
    let expected = "error: uploading table \"t\": the rows are not sorted by k, contrary to sorted_by: row 3 (2) is less than the row \
                    before it (3); rows are counted from 1";
    assert!(said.starts_with(expected), "{said}");
}

fn interrupt(child: Child) -> Output {
    send_interrupt(&child);
    child.wait_with_output().unwrap()
}

#[test]
fn an_interrupted_fetch_leaves_no_file() {
    // A server that accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("http://{}", silent.local_addr().unwrap());
    for line in [&["get", "t", "-o", "t.csv"][..], &["join", "a", "b", "--on", "k", "-o", "t.csv"]] {
        let folder = tempfile::tempdir().unwrap();
        let child = begin(folder.path(), &[line, &["--server", &uri]].concat());
        // The command creates the file before it connects, and handles interruptions from then on.
        let _connection = silent.accept().unwrap();
        assert_eq!(names_in(folder.path()).len(), 1, "{line:?}");
        let output = interrupt(child);
        assert_eq!(output.status.code(), Some(130), "{line:?}: {}", stderr(&output));
        assert_eq!(stderr(&output), "error: interrupted\n");
        assert_eq!(names_in(folder.path()), [""; 0], "{line:?}");
    }
}

#[test]
fn printing_is_interrupted_even_if_the_output_is_not_read() {
    let server = Server::start(&[]);
    write_tables(server.path(), 50_000);
    server.ok(&["put", "orders.csv"]);
    for how in [&["--limit", "0"][..], &["--limit", "0", "--json"]] {
        let line = [&["get", "orders", "--server", &server.flight], how].concat();
        let mut child = begin(server.path(), &line);
        // The first byte shows that printing has begun. The output is far more than a pipe holds.
        let mut first = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        send_interrupt(&child);
        wait_until("the command to end", || child.try_wait().unwrap().is_some());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{how:?}: {}", stderr(&output));
    }
}

#[test]
fn a_broken_connection_is_reported_as_broken() {
    let rude = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("http://{}", rude.local_addr().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut child = begin(folder.path(), &["tables", "--server", &uri]);
    let connection = rude.accept().unwrap();
    // The client reconnects after the connection breaks. Without the listener, that fails.
    drop(rude);
    drop(connection);
    wait_until("the command to give up", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    // Timing decides whether the connection breaks while it is opened or in the call.
    let expected = ["the connection to the server broke: ", "cannot reach a server"];
    assert!(expected.iter().any(|words| said.contains(words)), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn an_interrupted_upload_leaves_nothing_on_the_server() {
    let server = Server::start(&[]);
    write_tables(server.path(), 1000);
    server.ok(&["put", "orders.csv"]);
    server.ok(&["get", "orders", "-o", "orders.arrows"]);
    server.ok(&["drop", "orders"]);
    let written = fs::read(server.path().join("orders.arrows")).unwrap();
    let under_way = || server.metric("dovetail_uploads_under_way");
    for streams in ["1", "3"] {
        let pipe = server.path().join(format!("pipe{streams}"));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let name = pipe.file_name().unwrap().to_str().unwrap();
        let line =
            ["put", name, "--table", "t", "--format", "arrow-stream", "--streams", streams, "--server", &server.flight];
        let child = begin(server.path(), &line);
        // The pipe gets all rows but not the end of the stream, so the upload waits for more.
        let mut pipe = fs::File::options().write(true).open(&pipe).unwrap();
        pipe.write_all(&written[..written.len() - 8]).unwrap();
        wait_until("the upload to be under way", || under_way() == 1.0);
        let output = interrupt(child);
        assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        assert_eq!(stderr(&output), "error: interrupted; table \"t\" is as it was before\n");
        wait_until("the upload to be gone", || under_way() == 0.0);
        assert!(server.json(&["tables"]).is_empty());
    }
    assert_eq!(server.metric("dovetail_arena_bytes{kind=\"used\"}"), 0.0);
}

#[test]
fn unwritable_output_is_an_error_and_a_closed_pipe_is_not() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = command().args(["serve", "--print-config"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write to standard output: No space left"), "{}", stderr(&output));
    let nobody = || std::io::pipe().unwrap().1;
    let output = command().args(["serve", "--print-config"]).stdout(nobody()).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()));
    let output = command().args(["serve", "--devices", "none"]).stderr(nobody()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "it is no panic");
}
