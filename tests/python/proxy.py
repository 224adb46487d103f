"""A proxy of HTTP/2 that cuts streams, as proxies do at their limits of time and size."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

DATA, HEADERS, RST_STREAM = 0, 1, 3
END_STREAM, END_HEADERS = 1, 4
# The field :status by its index in HPACK's static table, without indexing; a value of three characters follows.
STATUS = b"\x08\x03"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Proxy:
    """Passes connections on to a server, and frames of the server to the client, until it is told to cut them.

    The cut is made instead of the next frame of data: ``"close"`` closes the connection, ``"end"`` ends the stream
    without trailers, and a number resets it with this code. ``"http:504"`` is an answer with this status, instead of
    the next headers. Each connection passes `after_bytes` of data before.
    """

    def __init__(self, server: str, cut: str | int | None = None, after_bytes: int = 0) -> None:
        host, port = server.rsplit(":", 1)
        self._server = (host, int(port))
        self.cut = cut
        self._after_bytes = after_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.uri = f"grpc://{self.address}"
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._ends += [client, server]
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while part := client.recv(1 << 16):
                server.sendall(part)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            stream, passed = server.makefile("rb"), 0
            while head := stream.read(9):
                kind, number = head[3], int.from_bytes(head[5:], "big")
                payload = stream.read(int.from_bytes(head[:3], "big"))
                cut = self._cut_of(kind) if passed >= self._after_bytes else None
                passed += len(payload) if kind == DATA else 0
                if cut is None:
                    client.sendall(head + payload)
                elif cut == "close":
                    break
                elif cut == "end":
                    client.sendall(frame(DATA, END_STREAM, number))
                elif isinstance(cut, int):
                    client.sendall(frame(RST_STREAM, 0, number, cut.to_bytes(4, "big")))
                else:
                    status = STATUS + cut.removeprefix("http:").encode()
                    client.sendall(frame(HEADERS, END_HEADERS | END_STREAM, number, status))
        _end(client)
        _end(server)

    def _cut_of(self, kind: int) -> str | int | None:
        wanted = HEADERS if str(self.cut).startswith("http:") else DATA
        return self.cut if kind == wanted else None

    def close(self) -> None:
        """Ends all connections."""
        for end in self._ends:
            _end(end)
            end.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(connection: socket.socket) -> None:
    """Ends a connection, also for a thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
