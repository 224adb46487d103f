"""Errors, by the remedy that they need.

Every error of the server is a subclass of :class:`Error` whose text is exactly the message of the server, without the
additions of gRPC and pyarrow. The classes follow the gRPC status codes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight


class Error(Exception):
    """Error of the server, or of the connection to it.

    Attributes:
        code: The gRPC status code in capitals, such as ``"NOT_FOUND"``.
    """

    code: str = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidRequest(Error, ValueError):
    """The request is invalid. Sending it again does not help."""

    code = "INVALID_ARGUMENT"


class NotFound(Error, LookupError):
    """A table, job, upload or ticket of that name does not exist, or no longer."""

    code = "NOT_FOUND"


class AlreadyExists(Error):
    """The name is taken. Choose another, or ``mode="replace"``."""

    code = "ALREADY_EXISTS"


class FailedPrecondition(Error):
    """The object that the request names is in the wrong state."""

    code = "FAILED_PRECONDITION"


class Unauthenticated(Error):
    """The token is missing, or the server does not know it."""

    code = "UNAUTHENTICATED"


class PermissionDenied(Error):
    """The server knows the caller, but the caller may not do this."""

    code = "PERMISSION_DENIED"


class Exhausted(Error):
    """Memory, a quota or the queue is full. Wait, request less, or raise the setting that the message names."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(Error):
    """The server cannot be reached, or cannot serve now. Trying again later may work."""

    code = "UNAVAILABLE"


class Cancelled(Error):
    """The work was cancelled."""

    code = "CANCELLED"


class DeadlineExceeded(Error, TimeoutError):
    """The work was not done within the timeout of a call or of :meth:`Job.wait`."""

    code = "DEADLINE_EXCEEDED"


class Unsupported(Error, NotImplementedError):
    """The protocol allows the request, but this server does not support it."""

    code = "UNIMPLEMENTED"


class InternalError(Error):
    """Defect of the server. Please report it with the log of the server."""

    code = "INTERNAL"


# How pyarrow words each status code.
_BY_WORDING: dict[str, type[Error]] = {
    "invalid argument": InvalidRequest,
    "out-of-range": InvalidRequest,
    "not found": NotFound,
    "already exists": AlreadyExists,
    "precondition failed": FailedPrecondition,
    "unauthenticated": Unauthenticated,
    "unauthorized": PermissionDenied,
    "resource exhausted": Exhausted,
    "unavailable": Unavailable,
    "timeout": DeadlineExceeded,
    "unimplemented": Unsupported,
    "internal": InternalError,
    "aborted": InternalError,
    "data loss": InternalError,
}

# Where the wording does not help, the class of pyarrow's exception does.
_BY_CLASS: list[tuple[type[BaseException], type[Error]]] = [
    (flight.FlightUnavailableError, Unavailable),
    (flight.FlightCancelledError, Cancelled),
    (flight.FlightTimedOutError, DeadlineExceeded),
    (flight.FlightUnauthenticatedError, Unauthenticated),
    (flight.FlightUnauthorizedError, PermissionDenied),
    (flight.FlightInternalError, InternalError),
    (pa.ArrowNotImplementedError, Unsupported),
]

_WRAPPING = re.compile(
    r"^(?:[A-Za-z]+: )?(?:Flight|gRPC) "
    r"(?:returned (?P<status>[a-z -]+) error, with|cancelled call, with|RPC failed with) message: (?P<message>.*)$",
    re.DOTALL,
)
# pyarrow appends this to errors of streams; the server's sentence ends before it.
_DEBUG_CONTEXT = ". gRPC client debug context: "


def from_arrow(error: BaseException) -> Error | None:
    """Returns the error of this package for an exception of pyarrow's Flight client, or ``None`` for other exceptions.

    An exception that pyarrow raises without the server, such as one about the caller's data, has no wrapping to remove
    and stays unchanged.
    """
    if isinstance(error, Error):
        return error
    text = str(error)
    wrapped = _WRAPPING.match(text)
    if wrapped is None:
        # Of what pyarrow says by itself, only this is about the server: nothing answers where it should be.
        return Unavailable(text) if isinstance(error, flight.FlightUnavailableError) else None
    message = wrapped["message"].split(_DEBUG_CONTEXT, 1)[0].strip()
    if cut := _of_a_proxy(message):
        return cut
    if _NO_FLIGHT.search(message):
        return Unavailable(no_flight("the server's address"))
    kind = _BY_WORDING.get(wrapped["status"] or "")
    if kind is None:
        kind = next((ours for theirs, ours in _BY_CLASS if isinstance(error, theirs)), Error)
    if kind in (InternalError, Unavailable):
        return _of_the_connection(message) or kind(message)
    return kind(message)


def no_flight(address: str) -> str:
    """The message for an address where another kind of server answers."""
    return f"there is no Flight server at {address}; check the address (the port of metrics and health is another port)"


# What gRPC makes of an answer over HTTP that is none of gRPC, such as one of the port of metrics and health.
_NO_FLIGHT = re.compile(r"Received http2 header with status: \d+|Failed parsing HTTP/2|http1\.x server")


# Statuses of HTTP with which proxies answer for a server.
_OF_PROXIES = {408, 413, 429, 499, 502, 503, 504, 524}
_HTTP_STATUS = re.compile(r"Received http2 header with status: (\d+)")

# Messages of statuses that Envoy makes itself, and proxies that are built on it.
_OF_ENVOY = ("upstream request timeout", "stream timeout", "upstream connect error")

# How gRPC words a stream that was cut while its connection stayed.
_CUT = re.compile(r"Received RST_STREAM with error code (?P<code>\d+)|Data frame with END_STREAM flag received")


def _of_a_proxy(message: str) -> Unavailable | None:
    """Returns the error about a stream that was cut, or an answer that a proxy made instead of the server.

    >>> _of_a_proxy("Received http2 header with status: 504").message.partition(":")[0]
    'a proxy between client and server answered with HTTP status 504 (Gateway Timeout)'
    >>> _of_a_proxy("Stream removed (Received RST_STREAM with error code 2 (RST_STREAM))").message.partition(";")[0]
    'the connection to the server broke: the stream was reset (code 2 of HTTP/2)'
    >>> _of_a_proxy("there is no table 't'") is None
    True
    """
    if message.startswith(_OF_ENVOY):
        return _answered(json.dumps(message, ensure_ascii=False))
    if (found := _HTTP_STATUS.search(message)) and (status := int(found[1])) in _OF_PROXIES:
        reason = HTTPStatus(status).phrase if status in HTTPStatus.__members__.values() else ""
        return _answered(f"HTTP status {status}" + (f" ({reason})" if reason else ""))
    if found := _CUT.search(message):
        code = found["code"]
        how = "ended without the server's status" if code is None else f"was reset (code {code} of HTTP/2)"
        return _broke(f"the stream {how}")
    return None


def _answered(what: str) -> Unavailable:
    return Unavailable(
        f"a proxy between client and server answered with {what}: the server has ended or cannot be reached, or the "
        "proxy has a limit of time or size that is too low; check both, and start again"
    )


def _broke(cause: str) -> Unavailable:
    """The error about a connection or a stream that broke off. The client cannot tell which of the two has cut it."""
    return Unavailable(
        f"the connection to the server broke: {cause}; either the server has ended (its tables end with it), or a "
        "proxy between client and server has cut the stream, at a limit of time or size; check both, and start again"
    )


# How gRPC words a connection that could not be made, with the cause behind the last colon.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?P<where>\S+): (?P<cause>.*)$", re.DOTALL
)

# How it words a name that stands for no address, in its versions; the whole of what it says.
_NOT_FOUND = re.compile(
    r"(?:errors resolving |DNS resolution failed for |address lookup failed for "
    r"|C-ares status is not ARES_SUCCESS qtype=\w+ name=)"
    r"(?:dns:/*)?(?P<host>\[[^\s\]]+\]|[^\s:;,\]]+)(?::\w+)?(?: is_balancer=\d)?: .+",
    re.DOTALL,
)

# What to do about it, by words of the cause; the first that fit count.
_ADVICE = [
    # What the system says where nothing listens.
    ("Connection refused", "`dovetail serve` starts one"),
    ("wrong version number", "it does not speak TLS there; write grpc://"),
    (
        "is not in peer certificate",
        "connect with a name or address from its certificate, or make a certificate for this name",
    ),
    # What gRPC makes of an alert after the handshake.
    (
        "TSI_DATA_CORRUPTED",
        "the server does not accept this client's certificate; it must know the authority of cert",
    ),
    ("expired", "renew the certificate of the server, or correct the clock of this machine"),
    (
        "certificate",
        "name the authority of the server's certificate with tls_root_certs; for a self-signed one, the certificate",
    ),
]

# How it words one that was there, among much else that only its authors understand.
_BROKEN = re.compile(
    r"(?:recvmsg|sendmsg): ?(?P<system>[A-Z][a-z]+(?: [a-z]+)*)|Socket closed|Broken pipe|Connection reset by peer"
    r"|Stream removed|GOAWAY|ping timeout|keepalive watchdog timeout"
)


def _of_the_connection(message: str) -> Unavailable | None:
    """Returns the error that gRPC itself reports about the connection to the server, with a remedy.

    >>> failed = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8815: "
    >>> _of_the_connection(failed + "Failed to connect to remote host: Connection refused")
    Unavailable('cannot reach a server at 127.0.0.1:8815: Connection refused; `dovetail serve` starts one')
    >>> _of_the_connection(failed + "Ssl handshake failed: SSLV3_ALERT_HANDSHAKE_FAILURE")
    Unavailable('cannot reach a server at 127.0.0.1:8815: SSLV3_ALERT_HANDSHAKE_FAILURE')
    >>> _of_the_connection("errors resolving db:8815: [field:hostname lookup error:Domain name not found]").message
    'cannot reach a server: the host db cannot be found; check the name, and that this machine can resolve it'
    >>> unknown = "C-ares status is not ARES_SUCCESS qtype=A name=db is_balancer=0: Domain name not found"
    >>> resolving = f"DNS resolution failed for db:8815: {unknown}"
    >>> _of_the_connection(unknown).message == _of_the_connection(resolving).message
    True
    >>> _of_the_connection("no column has name=foo: the lookup failed for it") is None
    True
    """
    if refused := _NOT_CONNECTED.search(message):
        cause = re.split(r": ?", refused["cause"])[-1]
        where = unquote(refused["where"].partition(":")[2])
        advice = next((f"; {advice}" for words, advice in _ADVICE if words in cause), "")
        return Unavailable(f"cannot reach a server at {where}: {cause}{advice}")
    if unknown := _NOT_FOUND.fullmatch(message):
        return Unavailable(
            f"cannot reach a server: the host {unknown['host']} cannot be found; check the name, and that this "
            "machine can resolve it"
        )
    causes = list(_BROKEN.finditer(message))
    if not causes:
        return None
    # What the system said of the socket tells more than what gRPC made of it.
    cause = next((found["system"] for found in causes if found["system"]), causes[-1][0])
    return _broke(cause)


@contextmanager
def translated(call: str = "the call", limit: float | None = None) -> Iterator[None]:
    """Converts pyarrow's exceptions to :class:`Error`.

    `call` describes the work, and `limit` is its time limit in seconds. pyarrow itself reports only that a deadline was
    exceeded.
    """
    try:
        yield
    except (pa.ArrowException, flight.FlightError, KeyError, OSError) as error:
        ours = from_arrow(error)
        if ours is None or ours is error:
            raise
        if limit is not None and isinstance(ours, DeadlineExceeded):
            ours = DeadlineExceeded(
                f"{call} was not done within {limit:g} s, the limit of each call of this client, including transfers; "
                "set a longer limit with dovetail.connect(call_timeout=...), or None for no limit"
            )
        raise ours from None
