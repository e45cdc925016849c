"""The messages between ranks and the monitor: their schema, their bounds, and their authentication.

Each is a *frame*: a length, an HMAC-SHA256 with the shared token over random numbers of both sides and the body, and
JSON. Without the token nobody can forge or replay a frame; frames are not encrypted.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from commtrace.errors import CommtraceError
from commtrace.findings.finding import Finding
from commtrace.findings.status import JobMeans, LiveEvent
from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from commtrace.live.monitoring.waits import Least
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.wire_types import Count, Instant, Key, Number, Rank, Text, WireGroup, WorldSize
from commtrace.trace.hang_report import Activity, InFlight

GREETING: Final = b"commtrace-monitor 3\n"
NONCE_BYTES: Final = 16
_LENGTH: Final = struct.Struct("!I")
_MAC_BYTES: Final = 32
HEADER_BYTES: Final = _LENGTH.size + _MAC_BYTES
MOST_BYTES: Final = 256 * 1024
"""The longest message that is read."""

SECONDS: Final = 3.0
"""Limit of one exchange, from connecting to the reply."""

MOST_GROUPS_ASKED: Final = 64
MOST_GROUPS: Final = 512
MOST_IN_FLIGHT: Final = 256
MOST_LEAST: Final = 512
MOST_EVENTS: Final = 20


class MessageError(CommtraceError):
    """A message is longer than allowed, is not authentic, or does not fit the schema."""


class WatchedJob(Struct, frozen=True):
    """The job of a request; ``seconds`` is the length of a window."""

    run_id: Text
    attempt: Count
    world_size: WorldSize
    seconds: Annotated[float, Meta(ge=0.01, le=1e6)]


class WireProcess(Struct, frozen=True):
    host: Text
    boot_id: Text
    pid: Count
    session: Instant


class Report(Struct, frozen=True, tag="report"):
    """A rank's newest window, and its questions."""

    job: WatchedJob
    window: WindowReport
    groups: Annotated[tuple[Key, ...], Meta(max_length=MOST_GROUPS_ASKED)] = ()  # whose least times it asks for
    asks_findings: bool = False
    process: WireProcess | None = None  # if it falls silent, its state can be read on its own host
    asks_job_steps: bool = False


class WireHangReport(Struct, frozen=True):
    """A rank's report when training makes no progress; fields as in the rank's own file."""

    rank: Rank
    node: Text
    boot_id: Text
    backend: Text
    time: Annotated[float, Meta(ge=0, le=1e11)]  # epoch seconds, and monotonic_ns the same instant
    monotonic_ns: Instant
    no_progress_ns: Instant  # without progress
    groups: Annotated[tuple[WireGroup, ...], Meta(max_length=MOST_GROUPS)]
    coordinates: Annotated[dict[Text, Number], Meta(max_length=32)]
    parallel: Annotated[dict[Text, Number], Meta(max_length=32)]
    activity: Activity
    in_flight: Annotated[tuple[InFlight, ...], Meta(max_length=MOST_IN_FLIGHT)]


class RankHang(Struct, frozen=True, tag="hang"):
    """Training has stopped on a rank, or goes on; ``report`` is None if it does not fit into a message."""

    job: WatchedJob
    rank: Rank
    has_stopped: bool
    report: WireHangReport | None = None


Request: TypeAlias = Report | RankHang
_Message = TypeVar("_Message")


class PeerBaseline(Struct, frozen=True):
    """Facts about other ranks that a rank needs."""

    block_steps: Count = 0  # steps of a block; 0 if not known yet
    window: int = -1  # the newest one that was joined; −1 before the first
    # typical per step at the rank's stage in that window; 0 without another rank
    work_ns: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    work_class: Number = -1  # of the rank, in a pipeline whose stages nobody told; −1: none


class MonitorFindings(Struct, frozen=True):
    """See :class:`commtrace.findings.status.JobView`; the first of each, so that a message is bounded."""

    findings: Annotated[tuple[Finding, ...], Meta(max_length=MOST_EVENTS)] = ()
    events: Annotated[tuple[LiveEvent, ...], Meta(max_length=MOST_EVENTS)] = ()
    means: JobMeans | None = None


class Reply(Struct, frozen=True):
    """The answer of the monitor; ``refused`` is the reason to refuse, or empty."""

    refused: Text = ""
    baseline: PeerBaseline = PeerBaseline()
    least: Annotated[tuple[Least, ...], Meta(max_length=MOST_LEAST)] = ()
    findings: MonitorFindings = MonitorFindings()
    job_steps: Annotated[tuple[JobStep, ...], Meta(max_length=MOST_JOINED)] = ()


# Made here, by one thread: two threads that make the first decoder of a type at once crash (commtrace/trace/inputs.py).
_REQUESTS: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_REPLIES: Final = msgspec.json.Decoder(Reply)


def encoded(message: Request | Reply) -> bytes:
    """Return JSON; raise :class:`MessageError` if the message is too long, or a text in it is not Unicode."""
    try:
        body = msgspec.json.encode(message)
    except UnicodeEncodeError as error:
        raise MessageError(f"a message cannot be sent: {error}") from error
    if len(body) > MOST_BYTES:
        raise MessageError(f"a message of {len(body)} bytes is too long to be sent; the limit is {MOST_BYTES}")
    return body


def decoded_request(body: bytes) -> Request:
    """Return the request in ``body``; raise :class:`MessageError` without one."""
    return _decoded(body, _REQUESTS)


def decoded_reply(body: bytes) -> Reply:
    """Return the reply in ``body``; raise :class:`MessageError` without one."""
    return _decoded(body, _REPLIES)


def _decoded(body: bytes, decoder: msgspec.json.Decoder[_Message]) -> _Message:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message of this version: {error}") from error


def header(mac: bytes, body: bytes) -> bytes:
    """Return the header of a frame."""
    return _LENGTH.pack(len(body)) + mac


def read_header(received: bytes) -> tuple[int, bytes]:
    """Return the length of the body that follows, and its MAC; raise :class:`MessageError` if it is too long."""
    (length,) = _LENGTH.unpack_from(received)
    if length > MOST_BYTES:
        raise MessageError(f"a message of {length} bytes is too long to be read; the limit is {MOST_BYTES}")
    return length, received[_LENGTH.size :]


def mac_of(token: str, direction: bytes, nonces: Sequence[bytes], body: bytes) -> bytes:
    """Return the MAC of ``body`` for ``b"request"`` or ``b"reply"``, with the nonces of the monitor and the rank."""
    return hmac.digest(token.encode(), direction + b"".join(nonces) + body, "sha256")


def check_mac(expected: bytes, received: bytes) -> None:
    """Compare two MACs in constant time; raise :class:`MessageError` if they differ."""
    if not hmac.compare_digest(expected, received):
        raise MessageError("the two sides have different tokens (COMMTRACE_MONITOR_TOKEN)")
