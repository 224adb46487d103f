"""Status of jobs, as the server reports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, overload

from ._display import counted, html_table, text_table
from ._progress import human_bytes, human_count, human_seconds

_ENDED = frozenset({"complete", "failed", "cancelled"})

_JOB_HEADING = ["job", "state", "done", "join", "strategy", "rows"]
_QUEUE_HEADING = ["behind", "starts in", "waiting for"]
_JOB_RIGHT = [0, 2, 5, 6, 7]


@dataclass(frozen=True, repr=False)
class JobStatus:
    """Status of a job at one moment.

    Attributes:
        id: Number of the job.
        state: ``"queued"``, ``"running"``, ``"complete"``, ``"failed"`` or ``"cancelled"``.
        progress: Share of the work that is done, 0 to 1.
        queue_position: Number of jobs that start before a queued job.
        predicted_start: Time when a queued job is expected to start.
        waiting_for: What a queued job waits for: a device, or memory.
        seconds: Seconds that the job has run.
        rows: Rows of the result so far.
        bytes: Bytes of the result so far.
        error: Error message of a failed job.
        raw: The whole answer of the server.
    """

    id: int
    state: str
    progress: float
    queue_position: int | None
    predicted_start: datetime | None
    waiting_for: str | None
    seconds: float
    rows: int
    bytes: int
    error: str | None
    raw: Mapping[str, Any]

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> JobStatus:
        """Reads the server's answer."""
        error = answer.get("error")
        start = answer.get("predicted_start")
        return cls(
            id=int(answer["job"]),
            state=str(answer["state"]),
            progress=float(answer.get("progress") or 0.0),
            queue_position=answer.get("queue_position"),
            predicted_start=None if start is None else datetime.fromisoformat(start.replace("Z", "+00:00")),
            waiting_for=answer.get("waiting_for"),
            seconds=float(answer.get("run_seconds") or 0.0),
            rows=int(answer.get("rows") or 0),
            bytes=int(answer.get("bytes") or 0),
            error=error.get("message") if isinstance(error, Mapping) else error,
            raw=answer,
        )

    @property
    def done(self) -> bool:
        """True if the job has ended, successfully or not."""
        return self.state in _ENDED

    @property
    def counts(self) -> bool:
        """True if the job counts rows instead of making them. Its one row is then the count."""
        return bool(self.raw.get("count"))

    @property
    def fraction(self) -> float:
        """Share of the work that is done, for a progress bar."""
        return 1.0 if self.state == "complete" else self.progress

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the job is done, from its progress so far. ``None`` if unknown."""
        if self.state != "running" or not 0.0 < self.progress <= 1.0:
            return None
        return self.seconds * (1 - self.progress) / self.progress

    @property
    def start_in(self) -> float | None:
        """Seconds until a queued job is expected to start."""
        if self.predicted_start is None:
            return None
        return max(0.0, (self.predicted_start - datetime.now(timezone.utc)).total_seconds())

    @property
    def summary(self) -> str:
        """State and rows in words, with rates and times if known."""
        if self.state == "queued":
            behind = {None: "queued", 0: "next in the queue"}.get(self.queue_position)
            words = [behind or f"queued behind {self.queue_position}"]
            if self.waiting_for:
                words.append(f"waits for {self.waiting_for}")
            if self.start_in is not None:
                # In the past when what runs before it takes longer than was predicted.
                words.append(f"starts in about {human_seconds(self.start_in)}" if self.start_in else "starts soon")
            return ", ".join(words)
        words = [self.state, *([] if self.counts else [counted(self.rows, "row")])]
        if self.state == "running" and self.bytes and self.seconds:
            words.append(f"{human_bytes(self.bytes / self.seconds)}/s")
        if self.seconds_left is not None:
            words.append(f"{human_seconds(self.seconds_left)} left")
        return ", ".join(words)

    def __repr__(self) -> str:
        rest = f": {self.error}" if self.error else "" if self.done else f", {self.fraction:.0%}"
        return f"<JobStatus {self.id}: {self.summary}{rest}>"


class Jobs(Sequence[JobStatus]):
    """Jobs of a server, oldest first. Displays as a table."""

    def __init__(self, jobs: Sequence[JobStatus]) -> None:
        self._jobs = list(jobs)

    @overload
    def __getitem__(self, index: int) -> JobStatus: ...
    @overload
    def __getitem__(self, index: slice) -> Jobs: ...
    def __getitem__(self, index: int | slice) -> JobStatus | Jobs:
        return Jobs(self._jobs[index]) if isinstance(index, slice) else self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __repr__(self) -> str:
        return text_table(self._heading(), self._rows(), right=_JOB_RIGHT) if self._jobs else "no jobs"

    def _repr_html_(self) -> str:
        return html_table(self._heading(), self._rows(), right=_JOB_RIGHT) if self._jobs else "<p>no jobs</p>"

    def _heading(self) -> list[str]:
        return [*_JOB_HEADING, *(_QUEUE_HEADING if self._some_wait() else [])]

    def _some_wait(self) -> bool:
        return any(job.state == "queued" for job in self._jobs)

    def _rows(self) -> list[list[str]]:
        return [
            [
                str(job.id),
                job.state,
                f"{job.fraction:.0%}",
                ("count of " if job.counts else "")
                + " ".join(str(job.raw.get(key) or "") for key in ("left", "how", "right")),
                str(job.raw.get("strategy") or ""),
                "" if job.counts else human_count(job.rows),
                *(_waits(job) if self._some_wait() else []),
            ]
            for job in self._jobs
        ]


def _waits(job: JobStatus) -> list[str]:
    return [
        "" if job.queue_position is None else human_count(job.queue_position),
        "" if job.start_in is None else human_seconds(job.start_in),
        job.waiting_for or "",
    ]
