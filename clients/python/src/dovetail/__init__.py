"""Dovetail's client: joins of large tables on the server's devices, over Arrow Flight.

Example:
    >>> import dovetail
    >>> client = dovetail.connect(server)
    >>> client.put("left", {"k": [1, 2, 3], "a": ["x", "y", "z"]}, mode="replace")
    3
    >>> client.put("right", {"k": [2, 3, 3], "b": [0.5, 1.5, 2.5]}, mode="replace")
    3
    >>> with client.join("left", "right", on="k", how="left") as result:
    ...     result.table().sort_by([("k", "ascending"), ("b", "ascending")]).to_pydict()
    {'k': [1, 2, 3, 3], 'a': ['x', 'y', 'z', 'z'], 'b': [None, 0.5, 1.5, 2.5]}
    >>> client.drop("left"), client.drop("right")
    (3, 3)
"""

from ._command import On, Then
from ._exchange import JoinReader, JoinStream
from ._jobs import Jobs, JobStatus
from ._result import Explanation, FetchProgress, Job, Result
from .client import (
    Client,
    Distribution,
    How,
    IntoMode,
    Mode,
    ServerInfo,
    Strategy,
    TableInfo,
    Tables,
    Topology,
    UploadProgress,
    connect,
)
from .errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Error,
    Exhausted,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Distribution",
    "Error",
    "Exhausted",
    "Explanation",
    "FailedPrecondition",
    "FetchProgress",
    "How",
    "InternalError",
    "IntoMode",
    "InvalidRequest",
    "Job",
    "JobStatus",
    "Jobs",
    "JoinReader",
    "JoinStream",
    "Mode",
    "NotFound",
    "On",
    "PermissionDenied",
    "Result",
    "ServerInfo",
    "Strategy",
    "TableInfo",
    "Tables",
    "Then",
    "Topology",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "UploadProgress",
    "connect",
]
