"""HTTP/2 by hand, for peers that stop in the middle of a message or do not read: no library lets its caller do that."""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict

from raw import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
WINDOW = 65_535
# Every server takes frames of this size.
FRAME = 16 << 10


def grpc_message(content: bytes, declared: int | None = None, flag: int = 0) -> bytes:
    """A gRPC message, or the beginning of one that is declared to be longer."""
    return struct.pack(">BI", flag, len(content) if declared is None else declared) + content


class Connection:
    """A connection to a server without TLS.

    It takes answers into windows of ``window`` bytes for each stream, and never enlarges them: with 0, the server can
    send no answer. It sends as much of each request as the server's windows allow, in the background.
    """

    def __init__(self, address: str, *, window: int = WINDOW, token: str | None = None) -> None:
        host, port = address.rsplit(":", 1)
        self._host = address
        self._token = token
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._lock = threading.Lock()
        self._next = 1
        self._initial = self._window = WINDOW
        self._windows: defaultdict[int, int] = defaultdict(int)
        self._waiting: dict[int, bytes] = {}
        # Streams that end with what waits to be sent.
        self._ending: set[int] = set()
        self.calls = 0
        # Streams that the server has ended, and the bytes that it has sent in answers.
        self.ended: set[int] = set()
        self.received = 0
        self.is_open = True
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self._socket.sendall(PREFACE + self._frame(SETTINGS, 0, 0, settings))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, content: bytes, *, encoding: str = "identity", end: bool = False) -> int:
        """Starts a call that sends these bytes and then, unless ``end``, nothing more. Its stream."""
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", SERVICE + method),
            (":authority", self._host),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("grpc-encoding", encoding),
        ]
        if self._token:
            headers.append(("authorization", f"Bearer {self._token}"))
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
        with self._lock:
            self.calls += 1
            stream = self._next
            self._next += 2
            self._windows[stream] = self._initial
            self._send(self._frame(HEADERS, END_HEADERS, stream, block))
            self._waiting[stream] = content
            if end:
                self._ending.add(stream)
            self._send_waiting(stream)
        return stream

    def close(self) -> None:
        self.is_open = False
        # Wakes the reader.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join()
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.is_open = False

    def _send_waiting(self, stream: int) -> None:
        while self.is_open and (content := self._waiting.get(stream)):
            room = min(self._window, self._windows[stream], FRAME)
            if room <= 0:
                return
            part, self._waiting[stream] = content[:room], content[room:]
            self._window -= len(part)
            self._windows[stream] -= len(part)
            self._send(self._frame(DATA, 0, stream, part))
        if self.is_open and stream in self._ending:
            self._ending.discard(stream)
            self._send(self._frame(DATA, END_STREAM, stream, b""))

    def _read(self) -> None:
        while self.is_open:
            try:
                head = self._receive(9)
                length, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
                self._handle(kind, flags, stream, self._receive(length))
            except OSError:
                self.is_open = False

    def _receive(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise OSError("the server closed the connection")
            found += part
        return found

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with self._lock:
            if kind == SETTINGS and not flags & ACK:
                for at in range(0, len(payload), 6):
                    name, value = struct.unpack_from(">HI", payload, at)
                    if name == INITIAL_WINDOW_SIZE:
                        for open_stream in self._windows:
                            self._windows[open_stream] += value - self._initial
                        self._initial = value
                self._send(self._frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                self._send(self._frame(PING, ACK, 0, payload))
            elif kind == WINDOW_UPDATE:
                increment = int.from_bytes(payload)
                if stream:
                    self._windows[stream] += increment
                else:
                    self._window += increment
            elif kind == DATA:
                self.received += len(payload)
            elif kind == GOAWAY:
                self.is_open = False
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.ended.add(stream)
                self._waiting.pop(stream, None)
                self._ending.discard(stream)
            for waiting in [*self._waiting]:
                self._send_waiting(waiting)


def _text(text: str) -> bytes:
    """A string of HPACK (RFC 7541, 5.2), of fewer than 127 + 128 bytes."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    return bytes([127, len(data) - 127]) + data
