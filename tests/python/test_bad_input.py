"""What is wrong gets a status code and a sentence that says what would be right, and leaves nothing behind.

After every test the `client` fixture asserts that the server serves the next request and that its memory is free again;
tests with a server of their own call :func:`is_unharmed`.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
from harness import Server, StartFailed, clean
from raw import Message, Raw, descriptor, messages

Start = Callable[..., Server]

TABLE = pa.table({"k": [1, 2, 3], "s": ["a", "b", "c"], "f": [0.5, 1.5, 2.5], "l": [[1], [2], []]})


@contextmanager
def refused(kind: type[dovetail.Error], *sentence: str) -> Iterator[None]:
    """Expects exactly that error, with all of these words in its sentence, and none of gRPC's around it."""
    with pytest.raises(dovetail.Error) as caught:
        yield
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for words in sentence:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
    for noise in ("gRPC", "status:", "Error {", "panicked", "RecordBatch {"):
        assert noise not in str(error), str(error)


@contextmanager
def refused_raw(codes: grpc.StatusCode | set[grpc.StatusCode], *sentence: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    allowed = codes if isinstance(codes, set) else {codes}
    assert error.code() in allowed, f"{error.code()}: {error.details()}"
    assert error.details(), f"{error.code()} without a sentence"
    for words in sentence:
        assert words in error.details(), f"{words!r} is not in {error.details()!r}"
    for noise in ("panicked", "Error {", "RecordBatch {"):
        assert noise not in error.details(), error.details()


def is_unharmed(server: Server, client: dovetail.Client, used: int = 0) -> None:
    """The server serves the next request, and holds no more memory than before."""
    client.put("next", {"k": [1, 2]})
    with client.join("next", "next", on="k") as result:
        assert sorted(result.table()["k"].to_pylist()) == [1, 2]
    client.drop("next")
    server.wait_for(lambda: server.arena_used() == used, f"host memory to be back at {used} bytes")
    server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


@pytest.fixture
def client(server: Server) -> Iterator[dovetail.Client]:
    """A client of the shared server, which must be unharmed when the test is over."""
    with server.connect() as client:
        yield client
        clean(server, client)
        is_unharmed(server, client)


# Joins


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
    with refused(dovetail.InvalidRequest, "host:9", "host:0"):
        client.join("a", "a", on="k", devices=["host:9"])
    with refused(dovetail.InvalidRequest, "priority", "-100 to 100"):
        client.join("a", "a", on="k", priority=101)
    with refused(dovetail.InvalidRequest, "at least one pair"):
        client.join("a", "a", on=[])


def test_key_types_that_do_not_match_are_both_named(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, '"k"', "Int64", '"s"', "Utf8", "cast"):
        client.join("a", "a", on={"k": "s"})
    with refused(dovetail.InvalidRequest, "Float64", "Int64"):
        client.join("a", "a", on={"f": "k"})


def test_an_unsupported_key_type_is_named_with_those_that_are_accepted(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, '"l"', "List", "cannot be a join key", "integers, floats, decimals"):
        client.join("a", "a", on="l")


def test_a_clash_of_names_in_the_result_is_refused(client: dovetail.Client) -> None:
    client.put("a", {"k": [1], "x": [1], "x_right": [1]})
    client.put("b", {"k": [1], "x": [2]})
    with refused(dovetail.InvalidRequest, '"x_right"', "two columns"):
        client.join("a", "b", on="k")
    with refused(dovetail.InvalidRequest, '"x"', "left.x"):
        client.join("a", "b", on="k", columns=["x"])


def test_into_a_name_that_is_taken_is_refused_before_the_join_runs(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    jobs = len(client.jobs())
    with refused(dovetail.AlreadyExists, '"a"'):
        client.join("a", "a", on="k", into="a")
    assert len(client.jobs()) == jobs


# Commands


def command(server: Server, body: bytes) -> None:
    connection = flight.connect(server.uri)
    with dovetail.errors.translated():
        connection.get_flight_info(flight.FlightDescriptor.for_command(body))


@pytest.mark.parametrize("body", [b"SELECT 1", b"\xff\xfe\xfd", b"[]", b"", b"\x0a\x03abc"])
def test_a_command_that_is_neither_json_nor_protobuf_is_answered_with_an_example(
    server: Server, client: dovetail.Client, body: bytes
) -> None:
    with refused(dovetail.InvalidRequest, '{"join": {"left": "orders"'):
        command(server, body)


def test_json_that_breaks_off_says_so(server: Server, client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, "JSON", "EOF"):
        command(server, b'{"join": {"left": "a"')


@pytest.mark.parametrize(
    ("body", "misspelt"),
    [
        ({"join": {"left": "a", "right": "b", "hwo": "left"}}, "hwo"),
        ({"jion": {}}, "jion"),
        ({"join": {"left": "a", "right": "b", "on": [{"left": "k", "rihgt": "k"}]}}, "rihgt"),
    ],
)
def test_json_with_an_unknown_field_names_it(
    server: Server, client: dovetail.Client, body: dict[str, object], misspelt: str
) -> None:
    with refused(dovetail.InvalidRequest, misspelt):
        command(server, json.dumps(body).encode())


def test_protobuf_with_an_unknown_field_or_of_an_unknown_message_is_refused(
    server: Server, client: dovetail.Client
) -> None:
    def packed(name: str, value: bytes) -> bytes:
        return _field(1, f"type.googleapis.com/{name}".encode()) + _field(2, value)

    join = _field(1, b"a") + _field(2, b"b")
    with refused(dovetail.InvalidRequest, "field number 15"):
        command(server, packed("dovetail.v1.Join", join + _field(15, b"x")))
    with refused(dovetail.InvalidRequest, "some.Message"):
        command(server, packed("some.Message", b""))
    with refused(dovetail.Unsupported, "Flight SQL", "join command"):
        command(server, packed("arrow.flight.protocol.sql.CommandStatementQuery", _field(1, b"SELECT 1")))


def _field(tag: int, value: bytes) -> bytes:
    return bytes([tag << 3 | 2, len(value)]) + value


def test_flight_calls_that_are_not_served_say_what_to_use_instead(server: Server, client: dovetail.Client) -> None:
    connection = flight.connect(server.uri)
    with refused(dovetail.Unsupported, "DoPut"), dovetail.errors.translated():
        writer, reader = connection.do_exchange(flight.FlightDescriptor.for_command(b"{}"))
        writer.begin(TABLE.schema)
        reader.read_chunk()
    with refused(dovetail.InvalidRequest, '"fly"', "drop_table"), dovetail.errors.translated():
        list(connection.do_action(flight.Action("fly", b"")))
    with refused(dovetail.InvalidRequest, "drop_table", "tabel"), dovetail.errors.translated():
        list(connection.do_action(flight.Action("drop_table", b'{"tabel": "a"}')))
    with refused(dovetail.NotFound, "no job 123456"):
        client.job(123456)
    with refused(dovetail.InvalidRequest, "path"), dovetail.errors.translated():
        connection.get_flight_info(flight.FlightDescriptor.for_path("a", "b"))


# Uploads


def test_a_duplicate_upload_is_refused_and_changes_nothing(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.AlreadyExists, '"a"', "replace"):
        client.put("a", TABLE.slice(0, 1))
    assert client.get("a").num_rows == 3


def test_appending_to_what_is_not_there_is_not_found(client: dovetail.Client) -> None:
    with refused(dovetail.NotFound, '"a"'):
        client.put("a", TABLE, mode="append")


def test_appending_another_schema_is_refused_and_changes_nothing(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, 'do not fit table "a"', "Int64", "Utf8", "mode replace"):
        client.put("a", {"k": ["x"]}, mode="append")
    assert client.get("a").equals(TABLE)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "names no table; a path has one part, the table's name"),
        ("x" * 256, "has 256 bytes; a name has 1 to 255 bytes and no control characters"),
        ("two\nlines", "has a control character in it; a name has 1 to 255 bytes and no control characters"),
        ("bell\a", "has a control character in it; a name has 1 to 255 bytes and no control characters"),
    ],
)
def test_a_name_that_nobody_could_write_is_refused(client: dovetail.Client, name: str, sentence: str) -> None:
    with refused(dovetail.InvalidRequest, sentence):
        client.put(name, TABLE)


def test_options_that_do_not_exist_are_refused(server: Server, client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, "overwrite"):
        client.put("a", TABLE, mode="overwrite")
    sent = messages(TABLE, "a")
    with Raw(server.address) as raw, refused_raw(grpc.StatusCode.INVALID_ARGUMENT, "mood"):
        raw.put([replace(sent[0], app_metadata=b'{"mood": "replace"}'), *sent[1:]])


def test_rows_that_are_not_sorted_as_declared_are_refused(client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, "not sorted by k", "row 2"):
        client.put("a", {"k": [1, 3, 2]}, sorted_by="k")


def test_duplicate_column_names_are_refused(client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, '"k"'):
        client.put("a", pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["k", "k"]))


def test_a_failed_source_leaves_no_table(client: dovetail.Client) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(10):
            yield pa.record_batch({"k": np.arange(100_000)})
        raise RuntimeError("the disk is on fire")

    for streams in (1, 3):
        with pytest.raises(RuntimeError, match="on fire"):
            client.put("a", batches(), streams=streams)
        assert len(client.tables()) == 0


def test_committing_or_aborting_an_unknown_upload_is_not_found(server: Server, client: dovetail.Client) -> None:
    connection = flight.connect(server.uri)
    for action in ("commit_upload", "abort_upload"):
        with refused(dovetail.NotFound, '"no such upload"'), dovetail.errors.translated():
            list(connection.do_action(flight.Action(action, b'{"upload": "no such upload"}')))


def test_a_schema_that_changes_in_mid_stream_is_refused(server: Server, client: dovetail.Client) -> None:
    first, second = messages(TABLE, "a"), messages(pa.table({"k": ["x"]}), "a")
    with Raw(server.address) as raw:
        with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, "schema changed", "k Utf8", "k Int64"):
            raw.put([*first, replace(second[0], descriptor=b""), *second[1:]])
        # A batch of another schema without its schema: two buffers too few.
        with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, '"s"', "fewer arrays"):
            raw.put([*first, *second[1:]])
    assert len(client.tables()) == 0


# Hostile messages


BIG = pa.table(
    {
        "k": pa.array(range(1237), pa.int64()),
        "s": pa.array([f"value {index}" for index in range(1237)]),
        "d": pa.array(["red", "green", None] * 412 + ["red"]).dictionary_encode(),
        "l": pa.array([[index, index + 1] for index in range(1237)]),
    }
)
BROKEN = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED}


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def every(data: bytes, value: int, width: int = 8) -> list[int]:
    """Where that number stands, as flatbuffers store it."""
    needle = value.to_bytes(width, "little")
    return [match.start() for match in re.finditer(re.escape(needle), data)]


def test_messages_by_hand_arrive(server: Server, client: dovetail.Client) -> None:
    # What the tests below change is right before it is changed.
    with Raw(server.address) as raw:
        acks = raw.put(messages(BIG, "a", max_chunksize=500))
    assert acks
    back = client.get("a")
    assert back.num_rows == BIG.num_rows
    assert back["s"].to_pylist() == BIG["s"].to_pylist()
    assert back["d"].to_pylist() == BIG["d"].to_pylist()


def test_messages_that_break_off_are_refused(server: Server, client: dovetail.Client) -> None:
    sent = messages(BIG, "a")
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    whole = len(sent[-1].body)
    with Raw(server.address) as raw:
        for cut in (0, 1, 7, whole // 2, whole - 1):
            with refused_raw(invalid, f"a body of {whole} bytes", f"it has {cut}"):
                raw.put([*sent[:-1], replace(sent[-1], body=sent[-1].body[:cut])])
        for cut in (1, 4, 9, len(sent[-1].header) // 2, len(sent[-1].header) - 9):
            with refused_raw(invalid, "header", "not an Arrow IPC"):
                raw.put([*sent[:-1], replace(sent[-1], header=sent[-1].header[:cut])])
        # Protobuf that breaks off: a field that claims more bytes than there are.
        with refused_raw(invalid, f"claims {whole} bytes", f"{whole - 100} left"):
            raw.put([sent[0], sent[-1].encode()[:-100]])
        # No messages, no schema, a batch before its dictionary.
        with refused_raw(invalid, "before its first message"):
            raw.put([])
        with refused_raw(invalid, "before its schema"):
            raw.put([Message(descriptor=descriptor(path=["a"]))])
        with refused_raw(invalid, "before the schema"):
            raw.put([replace(sent[-1], descriptor=descriptor(path=["a"]))])
        with refused_raw(invalid, '"d"', "dictionary", "was not sent before"):
            raw.put([sent[0], sent[-1]])
    assert len(client.tables()) == 0


def test_huge_declared_lengths_take_no_memory(server: Server, client: dovetail.Client) -> None:
    sent = messages(BIG, "a")
    header = sent[-1].header
    places = every(header, 1237) + every(header, 1237 * 8) + every(header, (1238 * 4 + 7) // 8 * 8)
    places += every(header, len(sent[-1].body))
    # Where an empty buffer begins does not matter, so its offset may be anything.
    places = [at for at in places if header[at + 8 : at + 16] != bytes(8)]
    assert len(places) >= 5, "the row counts and buffer lengths are in the header"
    used_max = server.metric(r'^dovetail_arena_bytes\{kind="used_max"\}')
    with Raw(server.address) as raw:
        for at in places:
            for length in (1 << 31, 1 << 40, (1 << 63) - 1, 0xFFFF_FFFF_FFFF_FFFF, 1 << 63):
                changed = patched(header, at, struct.pack("<Q", length))
                # The sentence shows the number, as the signed one that the format says it is.
                shown = length - (1 << 64) if length >> 63 else length
                with refused_raw(BROKEN, str(shown)):
                    raw.put([*sent[:-1], replace(sent[-1], header=changed)])
    grown = server.metric(r'^dovetail_arena_bytes\{kind="used_max"\}') - used_max
    assert grown <= 4 * len(sent[-1].body), f"the claims took {grown} bytes"
    assert len(client.tables()) == 0


def test_bad_offsets_are_refused(server: Server, client: dovetail.Client) -> None:
    table = pa.table({"s": pa.array(["abc"] * 1000)})
    sent = messages(table, "a")
    body = sent[-1].body
    offsets = body.index(struct.pack("<4i", 0, 3, 6, 9))
    with Raw(server.address) as raw:
        for place, value in (
            (0, -1),
            (1, -5),
            (2, 1 << 30),
            (3, 1),
            (1000, 2999 + 1000),
            (1000, 0x7FFF_FFFF),
            (1000, -1),
        ):
            changed = patched(body, offsets + 4 * place, struct.pack("<i", value))
            with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, '"s"'):
                raw.put([sent[0], replace(sent[-1], body=changed)])
        lists = messages(pa.table({"l": pa.array([[1, 2, 3]] * 1000)}), "a")
        body = lists[-1].body
        offsets = body.index(struct.pack("<4i", 0, 3, 6, 9))
        for place, value in ((1, -5), (2, 1 << 30), (1000, 1 << 20)):
            changed = patched(body, offsets + 4 * place, struct.pack("<i", value))
            with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, '"l"'):
                raw.put([lists[0], replace(lists[-1], body=changed)])


def test_bad_utf8_is_refused(client: dovetail.Client) -> None:
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(struct.pack("<3i", 0, 2, 4)), pa.py_buffer(b"ab\xff\xfe"))
    split = pa.StringArray.from_buffers(2, pa.py_buffer(struct.pack("<3i", 0, 1, 2)), pa.py_buffer("ß".encode()))
    for values in (broken, split):
        with refused(dovetail.InvalidRequest, '"s"', "utf-8"):
            client.put("a", pa.table({"k": [1, 2], "s": values}))


def test_bad_dictionary_keys_are_refused(client: dovetail.Client) -> None:
    for keys in ([0, 2], [-1, 0], [0, 127]):
        values = pa.DictionaryArray.from_arrays(pa.array(keys, pa.int8()), pa.array(["x", "y"]), safe=False)
        with refused(dovetail.InvalidRequest, '"d"', "out of bounds"):
            client.put("a", pa.table({"k": [1, 2], "d": values}))


def test_flipped_bytes_never_harm_the_server(server: Server, client: dovetail.Client, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent = messages(BIG.slice(0, 50).combine_chunks(), "a")
    outcomes: dict[str, int] = {}
    with Raw(server.address) as raw:
        for index, message in enumerate(sent):
            for part in ("header", "body"):
                data = getattr(message, part)
                places = range(len(data)) if len(data) < 700 else rng.choice(len(data), 700, replace=False)
                for at in places:
                    changed = patched(data, int(at), bytes([data[at] ^ (1 << int(rng.integers(0, 8)))]))
                    with_it = [*sent[:index], replace(message, **{part: changed}), *sent[index + 1 :]]
                    try:
                        raw.put(with_it)
                        outcome = "taken"
                        client.drop("a")
                    except grpc.RpcError as error:
                        outcome = error.code().name
                        assert error.code() in BROKEN, f"{part} {index}, byte {at}: {error.code()}: {error.details()}"
                        assert error.details(), f"{part} {index}, byte {at}: refused without a sentence"
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(f"seed {seed}: {outcomes}")
    assert outcomes["INVALID_ARGUMENT"] > 100


def test_a_message_over_the_limit_is_refused_with_the_limit(start: Start) -> None:
    server = start(devices="host:1", message_limit="1MiB", host_memory="256MiB")
    with server.connect() as client:
        sent = messages(pa.table({"k": np.arange(200_000)}), "a")
        with Raw(server.address) as raw:
            with refused_raw(grpc.StatusCode.RESOURCE_EXHAUSTED, "over the limit of 1.0 MiB", "--message-limit"):
                raw.put(sent)
        assert len(client.tables()) == 0
        is_unharmed(server, client)


# Tickets


def test_a_ticket_that_is_wrong_is_refused(server: Server, client: dovetail.Client) -> None:
    client.put("a", TABLE)
    connection = flight.connect(server.uri)
    ticket = connection.get_flight_info(flight.FlightDescriptor.for_path("a")).endpoints[0].ticket.ticket
    forged = [
        b"",
        b"a",
        ticket[:-1],
        ticket + b"x",
        *(patched(ticket, at, bytes([ticket[at] ^ 0x55])) for at in (0, 4, 20, len(ticket) - 2)),
    ]
    for bad in forged:
        with refused(dovetail.InvalidRequest, "ticket", "GetFlightInfo"), dovetail.errors.translated():
            connection.do_get(flight.Ticket(bad)).read_all()
    assert connection.do_get(flight.Ticket(ticket)).read_all().num_rows == 3


def test_a_ticket_of_a_table_that_was_replaced_or_dropped_is_refused(server: Server, client: dovetail.Client) -> None:
    client.put("a", TABLE)
    connection = flight.connect(server.uri)
    ticket = connection.get_flight_info(flight.FlightDescriptor.for_path("a")).endpoints[0].ticket
    client.put("a", TABLE, mode="replace")
    with refused(dovetail.FailedPrecondition, '"a" was replaced', "GetFlightInfo"), dovetail.errors.translated():
        connection.do_get(ticket).read_all()
    client.drop("a")
    with refused(dovetail.NotFound, 'no table "a"'), dovetail.errors.translated():
        connection.do_get(ticket).read_all()


def test_a_ticket_that_has_expired_is_not_found(start: Start) -> None:
    server = start(devices="host:1", ticket_seconds=1, host_memory="256MiB")
    with server.connect() as client:
        client.put("a", TABLE)
        used = server.arena_used()
        connection = flight.connect(server.uri)
        info = connection.get_flight_info(flight.FlightDescriptor.for_path("a"))
        time.sleep(1.5)
        with refused(dovetail.NotFound, "expired", "GetFlightInfo"), dovetail.errors.translated():
            connection.do_get(info.endpoints[0].ticket).read_all()
        # No fetch here: with tickets of a second, a slow machine could not make use of a good one.
        assert server.arena_used() == used
        assert [table.rows for table in client.tables()] == [3]


# Callers


TOKENS = """
# token tenant role weight
ann-writes  ann  writer
ann-reads   ann  reader
bob-writes  bob  writer 2
root        ops  admin
"""


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path


def test_a_missing_or_wrong_token_is_unauthenticated(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, host_memory="256MiB")
    with refused(dovetail.Unauthenticated, "token"):
        server.connect()
    for wrong in ("ann", "ann-writes-more", "ROOT", ""):
        with refused(dovetail.Unauthenticated, "token"):
            server.connect(token=wrong)
    connection = flight.connect(server.uri)
    with refused(dovetail.Unauthenticated, "Bearer"), dovetail.errors.translated():
        connection.get_flight_info(flight.FlightDescriptor.for_path("a"))
    with Raw(server.address) as raw, refused_raw(grpc.StatusCode.UNAUTHENTICATED, "Bearer"):
        raw.put(messages(TABLE, "a"))
    with server.connect(token="ann-writes") as client:
        is_unharmed(server, client)


def test_a_reader_may_not_write_and_a_tenant_may_not_use_foreign_tickets(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, host_memory="256MiB")
    with (
        server.connect(token="ann-writes") as ann,
        server.connect(token="ann-reads") as reader,
        server.connect(token="bob-writes") as bob,
        server.connect(token="root") as root,
    ):
        ann.put("a", TABLE)
        used = server.arena_used()
        assert reader.get("a").num_rows == 3
        with refused(dovetail.PermissionDenied, "writer", '"b"'):
            reader.put("b", TABLE)
        with refused(dovetail.PermissionDenied, "writer", '"a"'):
            reader.drop("a")
        with refused(dovetail.PermissionDenied, "writer", '"b"'):
            reader.join("a", "a", on="k", into="b")
        job = ann.submit("a", "a", on="k", columns=["k"])
        job.wait()
        # A job of another tenant is not to be seen, nor is its ticket good for anybody else.
        with refused(dovetail.NotFound, f"no job {job.id}"):
            bob.job(job.id)
        assert job.id not in [status.id for status in bob.jobs()]
        assert job.id in [status.id for status in root.jobs()]
        ticket = job.result()._info.endpoints[0].ticket
        headers = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer bob-writes")])
        with refused(dovetail.PermissionDenied, "another tenant"), dovetail.errors.translated():
            flight.connect(server.uri).do_get(ticket, headers).read_all()
        job.cancel()
        is_unharmed(server, ann, used)


def test_a_quota_that_is_exceeded_is_named_with_its_setting(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, tenant_memory="1MiB", tenant_tables=2, host_memory="256MiB")
    with server.connect(token="ann-writes") as ann, server.connect(token="bob-writes") as bob:
        with refused(dovetail.Exhausted, "ann", "tenant-memory"):
            ann.put("large", pa.table({"k": np.arange(1_000_000)}))
        ann.put("one", TABLE)
        ann.put("two", TABLE)
        with refused(dovetail.Exhausted, "ann", "tenant-tables"):
            ann.put("three", TABLE)
        bob.put("three", TABLE)
        for name in ("one", "two"):
            ann.drop(name)
        bob.drop("three")
        is_unharmed(server, ann)


def slow_join(client: dovetail.Client, rows: int = 30_000) -> None:
    """Tables whose join has rows * rows rows: it runs until it is cancelled."""
    client.put("slow", pa.table({"k": np.zeros(rows, np.int64), "v": np.arange(rows)}), mode="replace")


def test_a_full_queue_is_exhausted(start: Start) -> None:
    server = start(devices="host:1", queue_limit=2, host_memory="512MiB")
    with server.connect() as client:
        slow_join(client)
        # Released while it is read, and not read: it takes as long as we like.
        results = [client.join("slow", "slow", on="k", retain_seconds=0, strategy="hash")]
        server.wait_for(lambda: results[0].status().state == "running", "the first job to run")
        results += [client.join("slow", "slow", on="k", retain_seconds=0) for _ in range(2)]
        assert [result.status().state for result in results[1:]] == ["queued", "queued"]
        assert [result.status().queue_position for result in results[1:]] == [0, 1]
        with refused(dovetail.Exhausted, "2", "queue-limit"):
            client.join("slow", "slow", on="k", retain_seconds=0)
        for result in results:
            result.cancel()
        client.drop("slow")
        is_unharmed(server, client)


def test_a_tenant_with_too_many_jobs_is_exhausted(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, tenant_jobs=1, host_memory="512MiB")
    with server.connect(token="ann-writes") as ann, server.connect(token="bob-writes") as bob:
        slow_join(ann)
        first = ann.join("slow", "slow", on="k", retain_seconds=0)
        with refused(dovetail.Exhausted, "ann", "tenant-jobs"):
            ann.join("slow", "slow", on="k", retain_seconds=0)
        second = bob.join("slow", "slow", on="k", retain_seconds=0)
        first.cancel()
        second.cancel()
        ann.drop("slow")
        server.wait_for(lambda: first.status().done and second.status().done, "both jobs to end")

        def may_join_again() -> bool:
            # What has ended is off the tenant's account a moment later.
            try:
                ann.join("one", "one", on="k").cancel()
            except dovetail.Exhausted:
                return False
            return True

        ann.put("one", TABLE)
        server.wait_for(may_join_again, "the tenant to have no more jobs")
        ann.drop("one")
        with server.connect(token="root") as root:
            is_unharmed(server, root)


def test_a_result_too_large_for_the_memory_says_what_would_help(start: Start) -> None:
    server = start(devices="host:1", host_memory="96MiB", device_memory="64MiB")
    with server.connect() as client:
        slow_join(client, 5000)
        used = server.arena_used()
        # 25 million rows, as can be seen beforehand.
        with refused(dovetail.Exhausted, "host-memory", "retain_seconds"):
            client.join("slow", "slow", on="k")
        # 9 million rows of one key among many that do not repeat: counted before the join runs.
        keys = np.concatenate([np.zeros(3000, np.int64), np.arange(1, 300_000)])
        client.put("skewed", pa.table({"k": np.random.default_rng(1).permutation(keys), "v": np.arange(len(keys))}))
        with refused(dovetail.Exhausted, "host-memory", "at least"):
            client.join("skewed", "skewed", on="k")
        client.drop("skewed")
        # 16 million rows that statistics do not tell of, because two columns that always agree look like many keys: it fails
        # when the memory is full.
        keys = np.arange(30_000) % 55
        client.put("agreeing", pa.table({"a": keys, "b": keys, "v": np.arange(len(keys))}))
        with refused(dovetail.Exhausted, "host-memory"):
            result = client.join("agreeing", "agreeing", on=["a", "b"])
            with pytest.raises(dovetail.Exhausted):
                result.wait()
            assert result.status().state == "failed"
            result.table()
        client.drop("agreeing")
        # The same join, released as it is read, passes through.
        with client.join("slow", "slow", on="k", retain_seconds=0) as streamed:
            assert sum(batch.num_rows for batch in streamed.reader()) == 5000 * 5000
        is_unharmed(server, client, used)


def test_a_table_too_large_for_the_memory_is_exhausted(start: Start) -> None:
    server = start(devices="host:1", host_memory="32MiB", device_memory="8MiB")
    with server.connect() as client:
        for streams in (1, 3):
            with refused(dovetail.Exhausted, "host-memory"):
                client.put("a", pa.table({"k": np.arange(8_000_000)}), streams=streams)
            assert len(client.tables()) == 0
            is_unharmed(server, client)


def test_a_build_side_that_fits_no_device_is_refused_with_the_numbers(start: Start) -> None:
    server = start(devices="host:2", host_memory="512MiB", device_memory="1MiB")
    with server.connect() as client:
        client.put("a", pa.table({"k": np.arange(4_000_000)}))
        used = server.arena_used()
        # One hash table over four million keys, where a device has room for a thirtieth of the keys alone.
        with refused(dovetail.Exhausted, "device-memory", "MiB"):
            client.join("a", "a", on="k", strategy="hash").table()
        is_unharmed(server, client, used)


def test_a_deadline_that_passes_is_told_apart_from_a_cancel(start: Start) -> None:
    server = start(devices="host:1", host_memory="512MiB")
    with server.connect() as client:
        slow_join(client)
        result = client.join("slow", "slow", on="k", retain_seconds=0)
        waiting = client.join("slow", "slow", on="k", retain_seconds=0)
        options = flight.FlightCallOptions(timeout=0.5)
        with refused(dovetail.DeadlineExceeded), dovetail.errors.translated():
            flight.connect(server.uri).do_get(waiting._info.endpoints[0].ticket, options).read_all()
        result.cancel()
        with refused(dovetail.Cancelled, "cancelled"):
            result.wait()
        waiting.cancel()
        client.drop("slow")
        is_unharmed(server, client)


# Starting


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "0.0.0.0:0"}, ["0.0.0.0", "--insecure"]),
        ({"host_memory": "plenty"}, ["host-memory", "plenty", "GiB"]),
        ({"devices": "quantum:3"}, ["quantum:3", "host"]),
        ({"token_file": "/nowhere"}, ["/nowhere"]),
        ({"no_such_setting": "1"}, ["no-such-setting"]),
    ],
)
def test_a_setting_that_is_wrong_stops_the_server_with_a_sentence(
    tmp_path: Path, settings: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(StartFailed) as caught:
        Server(tmp_path, **settings)
    assert caught.value.code in (1, 2)
    for word in words:
        assert word in caught.value.log, caught.value.log
    assert "panicked" not in caught.value.log


def test_a_non_loopback_address_is_served_when_it_is_said_to_be_insecure(start: Start) -> None:
    server = start(listen="0.0.0.0:0", insecure=True, devices="host:1", host_memory="256MiB")
    port = server.address.rpartition(":")[2]
    with dovetail.connect(f"grpc://127.0.0.1:{port}") as client:
        is_unharmed(server, client)
