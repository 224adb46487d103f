"""Connections: one for requests, and more for parallel streams.

One TCP connection uses one core at each end and reaches about 3 GB/s, so each parallel stream has its own.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import pyarrow.flight as flight

from . import _arguments
from .errors import DeadlineExceeded, Error, Unauthenticated, Unavailable, no_flight, translated

Pem = str | bytes | os.PathLike[str]

_SCHEMES = {
    "grpc": "grpc+tcp",
    "grpc+tcp": "grpc+tcp",
    "http": "grpc+tcp",
    "grpc+tls": "grpc+tls",
    "grpcs": "grpc+tls",
    "https": "grpc+tls",
}
DEFAULT_PORT = 8815

KEEPALIVE_SECONDS = 30
"""Interval of keep-alive pings while a call waits for the server.

A healthy join may send nothing for hours. A host that lost its power, or a firewall that forgot the connection, sends
nothing either."""

KEEPALIVE_TIMEOUT_SECONDS = 20
"""Time limit for the answer to a keep-alive ping."""

# How long a server that has just refused a connection may take to say whether it speaks TLS.
_PROBE_SECONDS = 5.0

# A location that says: the connection on which the endpoint was handed out.
_REUSE = "arrow-flight-reuse-connection"


def location_of(uri: str) -> str:
    """Returns the URI in the form that pyarrow accepts.

    >>> location_of("grpc://127.0.0.1:8815")
    'grpc+tcp://127.0.0.1:8815'
    >>> location_of("https://gpu-host")
    'grpc+tls://gpu-host:8815'
    >>> location_of("localhost:9000")
    'grpc+tcp://localhost:9000'
    >>> location_of("grpc://[::1]")
    'grpc+tcp://[::1]:8815'
    """
    parts = urlsplit(uri if "://" in uri else f"grpc://{uri}")
    scheme = _SCHEMES.get(parts.scheme)
    try:
        port = parts.port
    except ValueError:
        scheme = port = None
    host = parts.hostname or ""
    # What pyarrow would not look at, such as the name of a user, was meant to say something.
    says_more = "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment
    if scheme is None or not host or says_more or any(map(str.isspace, host)):
        raise ValueError(
            f"{uri!r} is not the address of a server; write one such as grpc://127.0.0.1:8815, grpc://[::1]:8815, or "
            "grpc+tls://host:8815"
        )
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{DEFAULT_PORT if port is None else port}"


@contextmanager
def _shaking_hands(host: str, port: int | None, context: ssl.SSLContext | None = None) -> Iterator[ssl.SSLSocket]:
    """Opens a TLS connection as a probe. Nothing is sent. Only `context` checks the certificate of the server."""
    if context is None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port or DEFAULT_PORT), timeout=_PROBE_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        yield secure


def _speaks_tls(location: str) -> bool:
    """True if the server at a location without TLS speaks TLS."""
    parts = urlsplit(location)
    if parts.scheme != "grpc+tcp" or parts.hostname is None:
        return False
    try:
        with _shaking_hands(parts.hostname, parts.port):
            return True
    except OSError:
        return False


def _wants_certificate(location: str) -> bool:
    """True if the server at a location with TLS refuses clients without a certificate."""
    parts = urlsplit(location)
    if parts.scheme != "grpc+tls" or parts.hostname is None:
        return False
    try:
        with _shaking_hands(parts.hostname, parts.port) as secure:
            # With TLS 1.3 the refusal comes after the handshake, in the place of the server's first words.
            secure.recv(1)
    except ssl.SSLError as error:
        return "certificate required" in str(error) or "handshake failure" in str(error)
    except OSError:
        pass
    return False


def _is_trusted(location: str, roots: bytes | None) -> bool:
    """True if the server's certificate has a known authority: of `roots`, or else of the system."""
    parts = urlsplit(location)
    context = ssl.create_default_context(cadata=None if roots is None else roots.decode("ascii", "replace"))
    try:
        with _shaking_hands(parts.hostname or "", parts.port, context):
            return True
    except ssl.SSLCertVerificationError as error:
        return error.verify_code not in _UNKNOWN_AUTHORITY
    except OSError:
        return True


# OpenSSL's numbers for a certificate that signs itself, or is signed by who knows whom.
_UNKNOWN_AUTHORITY = {18, 19, 20, 21}


def _check_pair(cert: Pem, key: Pem) -> None:
    """Refuses a certificate and a key that do not belong together. grpc would name neither file.

    On systems without in-memory files, a mismatch of keys in memory shows only in the handshake.
    """
    if not hasattr(os, "memfd_create") and (_arguments.is_pem(cert) or _arguments.is_pem(key)):
        return
    with _as_file(cert) as cert_file, _as_file(key) as key_file:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert_file, key_file)
        except ssl.SSLError as error:
            if "mismatch" in str(error).lower():
                raise ValueError(
                    f"key{_named(key)} is not the key of cert{_named(cert)}; give a certificate and its own key"
                ) from None


@contextmanager
def _as_file(pem: Pem) -> Iterator[str]:
    """Returns the path of a PEM file. PEM that is not in a file goes to memory, because keys must not go to disk."""
    if not _arguments.is_pem(pem):
        yield os.fspath(cast("str", pem))
        return
    with open(os.memfd_create("pem"), "wb") as file:
        file.write(pem if isinstance(pem, bytes) else str(pem).encode())
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _named(pem: Pem) -> str:
    """Returns the file of a PEM argument in parentheses, if it has one."""
    return "" if _arguments.is_pem(pem) else f" ({os.fspath(cast('str', pem))})"


class _Headers(flight.ClientMiddleware):  # type: ignore[misc]
    """Headers that the server answers a call with, by their names in small letters."""

    def __init__(self) -> None:
        self.received: dict[str, str] = {}

    def received_headers(self, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        texts = {name.lower(): values[0] for name, values in headers.items() if values}
        self.received.update({name: text for name, text in texts.items() if isinstance(text, str)})


class _HeadersOfExchanges(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Keeps the headers of the last DoExchange of each thread. pyarrow hands them to middleware only."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def start_call(self, info: flight.CallInfo) -> _Headers | None:
        if info.method != flight.FlightMethod.DO_EXCHANGE:
            return None
        headers = self.of_thread.last = _Headers()
        return headers


class OpenStream(Protocol):
    """Stream that ends with its client."""

    def cancel(self) -> None:
        """Ends it."""


class Connections:
    """Connections to one server, all with the same credentials.

    Connections of finished streams are reused, so that a client opens at most as many as it uses at once.
    """

    def __init__(
        self,
        uri: str,
        token: str | None,
        tls_root_certs: Pem | None,
        cert: Pem | None,
        key: Pem | None,
        call_timeout: float | None,
    ) -> None:
        self.uri = uri
        self.location = location_of(uri)
        self.call_timeout = _arguments.seconds("call_timeout", call_timeout)
        if token and not (token.isascii() and token.isprintable()):
            raise ValueError("the token has characters that are not allowed in a header; a token is printable ASCII")
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        self._headers_received = _HeadersOfExchanges()
        # Its own pool makes a connection its own; large frames cost less CPU per byte; no limit on what we receive.
        self._options: dict[str, Any] = {
            "middleware": [self._headers_received],
            "generic_options": [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.http2.max_frame_size", 1 << 20),
                ("grpc.max_receive_message_length", -1),
                ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_SECONDS),
                ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_TIMEOUT_SECONDS),
                # Else a minute, whatever is said of keep-alives.
                ("grpc.http2.ping_timeout_ms", 1000 * KEEPALIVE_TIMEOUT_SECONDS),
                # By default a call that waits sends two, and then no more.
                ("grpc.http2.max_pings_without_data", 0),
            ],
        }
        if tls_root_certs is not None:
            self._options["tls_root_certs"] = _arguments.certificates("tls_root_certs", tls_root_certs)
        if (cert is None) != (key is None):
            given, lacking = ("key", "cert") if cert is None else ("cert", "key")
            raise ValueError(f"{given} is given without {lacking}; mutual TLS needs both")
        if cert is not None:
            self._options["cert_chain"] = _arguments.certificates("cert", cert)
            self._options["private_key"] = _arguments.private_key("key", key)
            _check_pair(cert, cast("Pem", key))
        self.message_limit: int | None = None
        """Largest message that the server accepts, in bytes, once known."""
        self._lock = threading.Lock()
        self._idle: dict[str, list[flight.FlightClient]] = {}
        self._streams: weakref.WeakSet[OpenStream] = weakref.WeakSet()
        self._closed = False
        self._main = self._open(self.location)

    @property
    def main(self) -> flight.FlightClient:
        """Connection for all requests."""
        if self._closed:
            raise Unavailable("this client is closed; connect again")
        return self._main

    @contextmanager
    def stream(self, locations: Sequence[flight.Location] = ()) -> Iterator[flight.FlightClient]:
        """Provides a connection for one stream, to the first reachable of `locations` or to the server."""
        location, client = self._take(locations)
        try:
            yield client
        finally:
            self._give_back(location, client)

    def options(
        self, timeout: float | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> flight.FlightCallOptions:
        """Returns the options of every call."""
        return flight.FlightCallOptions(
            timeout=self.call_timeout if timeout is None else timeout, headers=[*self._headers, *headers]
        )

    def stream_options(self) -> flight.FlightCallOptions:
        """Returns the options of a stream, which may last longer than a call."""
        return flight.FlightCallOptions(headers=self._headers)

    def headers_of_exchange(self) -> Mapping[str, str]:
        """Returns the headers of the DoExchange that this thread has begun. They arrive before its first message."""
        last: _Headers = self._headers_received.of_thread.last
        return last.received

    def opened(self, stream: OpenStream) -> None:
        """Ends a stream when the connections are closed."""
        with self._lock:
            if not self._closed:
                self._streams.add(stream)
                return
        stream.cancel()

    def calling(self, call: str) -> AbstractContextManager[None]:
        """Converts exceptions of a call to :class:`Error`, which names the call if it took too long."""
        return translated(call, self.call_timeout)

    def greet(self, timeout: float | None) -> None:
        """Checks that a server answers within `timeout` seconds.

        Otherwise the first call would wait for ever for a peer that accepts connections and never answers.
        """
        try:
            info = self.action("server_info", timeout=timeout)
            self.message_limit = info[0].get("message_limit_bytes") if info else None
        except Unauthenticated as error:
            advice = (
                "check the token of connect(token=...) or DOVETAIL_TOKEN"
                if self._headers
                else "give a token with connect(token=...) or DOVETAIL_TOKEN, or a certificate with "
                "connect(cert=..., key=...)"
            )
            raise Unauthenticated(f"{error}; {advice}") from None
        except Unavailable as error:
            address = self.location.partition("://")[2]
            if _speaks_tls(self.location):
                raise Unavailable(
                    f"the server at {address} speaks TLS; write grpc+tls://{address}, and name the certificate of its "
                    "authority with tls_root_certs unless the system knows it"
                ) from None
            if (
                "cert_chain" not in self._options
                and _wants_certificate(self.location)
                and _is_trusted(self.location, self._options.get("tls_root_certs"))
            ):
                raise Unavailable(
                    f"the server at {address} admits only clients with certificates: "
                    "give one with connect(cert=..., key=...), of an authority that the server knows"
                ) from None
            # It has found the host, and does not try where it has no use for what TLS needs.
            if error.message == "empty address list" and self._gives_pem():
                raise Unavailable(
                    "cannot reach a server: tls_root_certs, cert and key cannot be used for TLS; check that they are "
                    "undamaged PEM, and that key is the key of cert"
                ) from None
            if "no Flight server" in error.message:
                raise Unavailable(no_flight(address)) from None
            raise
        except DeadlineExceeded:
            if timeout is None:
                raise
            raise Unavailable(
                f"no answer from {self.uri} within {timeout:g} s: the server there is unreachable, is stuck, or is "
                "not Dovetail; check the address, or wait longer with connect(timeout=...)"
            ) from None

    def _gives_pem(self) -> bool:
        """True for TLS with certificates or keys other than those of the system."""
        return self.location.startswith("grpc+tls:") and any(
            option in self._options for option in ("tls_root_certs", "cert_chain")
        )

    def action(self, kind: str, body: Any = None, timeout: float | None = None) -> list[Any]:
        """Returns the answers of an action, parsed as JSON. `body` is sent as JSON, or unchanged if it is bytes."""
        encoded = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        limit = self.call_timeout if timeout is None else timeout
        with translated(f"the action {kind!r}", limit):
            answers = [
                result.body.to_pybytes()
                for result in self.main.do_action(flight.Action(kind, encoded), self.options(timeout))
            ]
        return [answer if isinstance(body, bytes) else json.loads(answer) for answer in answers]

    def close(self) -> None:
        """Closes all connections, and ends the open streams."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
            clients = [self._main, *(client for idle in self._idle.values() for client in idle)]
            self._idle.clear()
        for stream in streams:
            stream.cancel()
        for client in clients:
            client.close()

    def _open(self, location: str) -> flight.FlightClient:
        with translated():
            return flight.FlightClient(location, **self._options)

    def _take(self, locations: Sequence[flight.Location]) -> tuple[str, flight.FlightClient]:
        uris = [location.uri.decode() for location in locations]
        # Empty, or naming this connection: where we asked.
        candidates = [uri for uri in uris if not uri.startswith(_REUSE)] or [self.location]
        if len(candidates) < len(uris):
            candidates = [self.location]
        failure: Exception | None = None
        for candidate in candidates:
            if self._would_show_token(candidate):
                failure = Unavailable(f"{candidate} is without TLS, and the client does not send a token unencrypted")
                continue
            with self._lock:
                if self._closed:
                    raise Unavailable("this client is closed; connect again")
                idle = self._idle.get(candidate)
                if idle:
                    return candidate, idle.pop()
            try:
                client = self._open(candidate)
                if candidate != self.location and len(candidates) > 1:
                    with translated():
                        client.wait_for_available(timeout=5)
                return candidate, client
            except (Error, OSError) as error:
                failure = error
        raise Unavailable(f"none of the locations {', '.join(candidates)} can be reached: {failure}")

    def _would_show_token(self, location: str) -> bool:
        """Whether a server that was reached over TLS sends us, and our token, where there is none."""
        secure = ("grpc+tls://", "grpc+unix://")
        return bool(self._headers) and self.location.startswith(secure) and not location.startswith(secure)

    def _give_back(self, location: str, client: flight.FlightClient) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(location, []).append(client)
                return
        client.close()
