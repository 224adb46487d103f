"""Joins of what is not there, or does not fit together."""

from __future__ import annotations

import dovetail
from harness import DEVICE_KIND
from refusals import TABLE, refused


def test_an_unknown_table_is_not_found(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.NotFound, 'no table "nowhere"', "right side"):
        client.join("a", "nowhere", on="k")
    with refused(dovetail.NotFound, 'no table "nowhere"', "left side"):
        client.join("nowhere", "a", on="k")
    with refused(dovetail.NotFound, 'no table "nowhere"'):
        client.get("nowhere")
    with refused(dovetail.NotFound, 'no table "nowhere"'):
        client.schema("nowhere")
    with refused(dovetail.NotFound, 'no table "nowhere"'):
        client.drop("nowhere")
    with refused(dovetail.NotFound, 'no table "nowhere"'):
        client.explain("a", "nowhere", on="k")


def test_an_unknown_column_is_named_with_those_that_exist(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, 'no column "key"', "k, s, f, l"):
        client.join("a", "a", on={"k": "key"})
    with refused(dovetail.InvalidRequest, '"nothing"', "k, s, f, l"):
        client.join("a", "a", on="k", columns=["k", "nothing"])
    with refused(dovetail.InvalidRequest, '"nothing"'):
        client.put("b", TABLE, sorted_by="nothing")
    with refused(dovetail.InvalidRequest, '"nothing"'):
        client.put("b", TABLE, unique="nothing")


def test_an_unknown_strategy_kind_or_device_is_answered_with_those_that_exist(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, '"quantum"', "radix-hash-gfur", "sort-merge"):
        client.join("a", "a", on="k", strategy="quantum")
    with refused(dovetail.InvalidRequest, 'unknown kind of join "outer"', "left_semi", "right_anti"):
        client.join("a", "a", on="k", how="outer")
    with refused(dovetail.InvalidRequest, "host:9", f"name some of {DEVICE_KIND}:0"):
        client.join("a", "a", on="k", devices=["host:9"])
    with refused(dovetail.InvalidRequest, 'no device "gpu:5"', f"name some of {DEVICE_KIND}:0"):
        client.join("a", "a", on="k", devices="gpu:5")
    with refused(dovetail.InvalidRequest, "priority", "-100 to 100"):
        client.join("a", "a", on="k", priority=101)
    with refused(dovetail.InvalidRequest, 'the pair of "k" and "k" twice'):
        client.join("a", "a", on=[("k", "k"), ("k", "k")])
    with refused(dovetail.InvalidRequest, "at least one pair"):
        client.join("a", "a", on=[])
    with refused(dovetail.InvalidRequest, '"into" is empty'):
        client.join("a", "a", on="k", into="")


def test_key_types_that_do_not_match_are_both_named(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, '"k"', "is int64", '"s"', "is string", "cast"):
        client.join("a", "a", on={"k": "s"})
    with refused(dovetail.InvalidRequest, "is float64", "is int64"):
        client.join("a", "a", on={"f": "k"})


def test_an_unsupported_key_type_is_named_with_those_that_are_accepted(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, '"l"', "type list(int64) cannot be a join key", "integers, floats, decimals"):
        client.join("a", "a", on="l")


def test_a_clash_of_names_in_the_result_is_refused(client: dovetail.Client) -> None:
    client.put("a", {"k": [1], "x": [1], "x_right": [1]})
    client.put("b", {"k": [1], "x": [2]})
    with refused(dovetail.InvalidRequest, '"k"', "two columns"):
        client.join("a", "b", on="k", columns=["k", "left.k"])
    with refused(dovetail.InvalidRequest, '"x"', "left.x"):
        client.join("a", "b", on="k", columns=["x"])
    # A column of the right table gets another name instead.
    assert client.join("a", "b", on="k").table().column_names == ["k", "x", "x_right", "x_right_right"]


def test_a_result_name_that_is_taken_is_refused_before_the_join_runs(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    jobs = len(client.jobs())
    with refused(dovetail.AlreadyExists, '"a"'):
        client.join("a", "a", on="k", into="a")
    assert len(client.jobs()) == jobs
