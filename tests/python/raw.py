"""Flight's wire by hand, for messages that no well-behaved client sends.

pyarrow serializes tables to Arrow's stream format; here its messages are taken apart, changed, and put into FlightData
messages of our own making.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import grpc
import pyarrow as pa

SERVICE = "/arrow.flight.protocol.FlightService/"
DESCRIPTOR_PATH, DESCRIPTOR_CMD = 1, 2


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(tag: int, value: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    return varint(tag << 3 | 2) + varint(len(value)) + value


def descriptor(*, path: Iterable[str] = (), command: bytes | None = None) -> bytes:
    """A FlightDescriptor."""
    if command is not None:
        return b"\x08" + varint(DESCRIPTOR_CMD) + field(2, command)
    return b"\x08" + varint(DESCRIPTOR_PATH) + b"".join(field(3, part.encode()) for part in path)


@dataclass(frozen=True)
class Message:
    """One FlightData message."""

    header: bytes = b""
    body: bytes = b""
    descriptor: bytes = b""
    app_metadata: bytes = b""

    def encode(self) -> bytes:
        parts = [(1, self.descriptor), (2, self.header), (3, self.app_metadata), (1000, self.body)]
        return b"".join(field(tag, value) for tag, value in parts if value)


def messages(table: pa.Table, name: str, max_chunksize: int | None = None) -> list[Message]:
    """The messages of an upload of a table: schema, dictionaries, batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max_chunksize)
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(sink.getvalue()))
    found = []
    for message in reader:
        body = message.body.to_pybytes() if message.body is not None else b""
        found.append(Message(message.metadata.to_pybytes(), body))
    found[0] = replace(found[0], descriptor=descriptor(path=[name]))
    return found


class Raw:
    """A plain gRPC channel to a server."""

    def __init__(self, address: str, token: str | None = None) -> None:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            # A connection of its own: channels to one address share one otherwise.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(address, options=options)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def put(self, sent: Iterable[Message | bytes], timeout: float = 60) -> list[bytes]:
        """DoPut; the acknowledgements."""
        call = self._channel.stream_stream(f"{SERVICE}DoPut")
        return list(call(_encoded(sent), metadata=self._metadata, timeout=timeout))

    def unary(self, method: str, request: bytes, timeout: float = 60) -> bytes:
        """A call with one request and one answer."""
        return self._channel.unary_unary(SERVICE + method)(request, metadata=self._metadata, timeout=timeout)

    def stream(self, method: str, request: bytes, timeout: float = 60) -> Iterator[bytes]:
        """A call with one request and many answers."""
        return self._channel.unary_stream(SERVICE + method)(request, metadata=self._metadata, timeout=timeout)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _encoded(sent: Iterable[Message | bytes]) -> Iterator[bytes]:
    for message in sent:
        yield message if isinstance(message, bytes) else message.encode()
