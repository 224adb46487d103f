"""Messages that no well-behaved client sends: cut short, with false lengths, offsets, text, keys, and flipped bits."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace

import grpc
import numpy as np
import pyarrow as pa

import dovetail
from harness import Server
from raw import Message, Raw, descriptor, messages
from refusals import is_unharmed, patched, refused, refused_raw

Start = Callable[..., Server]

BIG = pa.table(
    {
        "k": pa.array(range(1237), pa.int64()),
        "s": pa.array([f"value {index}" for index in range(1237)]),
        "d": pa.array(["red", "green", None] * 412 + ["red"]).dictionary_encode(),
        "l": pa.array([[index, index + 1] for index in range(1237)]),
    }
)
# What headers can name that is Arrow, or may be one day, and not taken here.
FOREIGN = re.compile(r"format .* is not supported|message of type .* is not supported|is big-endian")


def every(data: bytes, value: int, width: int = 8) -> list[int]:
    """Where that number stands, as flatbuffers store it."""
    needle = value.to_bytes(width, "little")
    return [match.start() for match in re.finditer(re.escape(needle), data)]


def test_valid_handmade_messages_are_accepted(server: Server, client: dovetail.Client) -> None:
    # What the tests below change is right before it is changed.
    with Raw(server.address) as raw:
        acks = raw.put(messages(BIG, "a", max_chunksize=500))
    assert acks
    back = client.get("a")
    assert back.num_rows == BIG.num_rows
    assert back["s"].to_pylist() == BIG["s"].to_pylist()
    assert back["d"].to_pylist() == BIG["d"].to_pylist()


def test_truncated_messages_are_refused(server: Server, client: dovetail.Client) -> None:
    sent = messages(BIG, "a")
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    whole = len(sent[-1].body)
    with Raw(server.address) as raw:
        for cut in (0, 1, 7, whole // 2, whole - 1):
            with refused_raw(invalid, f"a body of {whole} bytes", f"the body has {cut}"):
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
                with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, str(shown)):
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
                        foreign = part == "header" and FOREIGN.search(error.details() or "")
                        expected = "UNIMPLEMENTED" if foreign else "INVALID_ARGUMENT"
                        assert outcome == expected, f"{part} {index}, byte {at}: {outcome}: {error.details()}"
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
