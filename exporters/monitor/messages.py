"""The messages between ranks and the monitor: their schema, their bounds, and how they are authenticated.

A rank connects, and the monitor greets it with a random number. The rank sends one request and reads one reply. Each
of the two is a *frame*: a length, an HMAC-SHA256 that the shared token makes of the frame and of the random numbers of
both sides, and JSON. So neither can be made without the token nor sent a second time; both can be read on the way.

>>> body = encoded(Report(job, window, groups))                 # doctest: +SKIP
>>> decoded(body, Request)                                      # doctest: +SKIP
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from commtrace.errors import CommtraceError
from commtrace.live.monitoring.findings import LiveEvent, LiveStraggler
from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from commtrace.live.monitoring.waits import Least
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.wire_types import Count, GroupMembers, Instant, Key, Number, Rank, Text, WorldSize

GREETING: Final = b"commtrace-monitor 1\n"
NONCE_BYTES: Final = 16
_LENGTH: Final = struct.Struct("!I")
_MAC_BYTES: Final = 32
HEADER_BYTES: Final = _LENGTH.size + _MAC_BYTES
MOST_BYTES: Final = 256 * 1024
"""Of one message: nothing longer is read, whatever its length says."""

SECONDS: Final = 3.0
"""For one exchange, from connecting to the reply."""

MOST_GROUPS_ASKED: Final = 64
MOST_GROUPS: Final = 512
MOST_IN_FLIGHT: Final = 256
MOST_LEAST: Final = 512
MOST_EVENTS: Final = 20


class MessageError(CommtraceError):
    """A message is longer than allowed, is not authentic, or does not fit the schema."""


class Job(Struct, frozen=True):
    """The job that a request is about.

    Attributes:
        run_id, attempt: name it.
        world_size: its ranks.
        seconds: length of a window.
    """

    run_id: Text
    attempt: Count
    world_size: WorldSize
    seconds: Annotated[float, Meta(ge=0.01, le=1e6)]


class Process(Struct, frozen=True):
    """The process of a rank, see :class:`commtrace.trace.metadata.RankMetadata`."""

    host: Text
    boot_id: Text
    pid: Count
    session: Instant


class Report(Struct, frozen=True, tag="report"):
    """A rank's newest window, and what it wants to know.

    Attributes:
        job: of the rank.
        window: what it did.
        groups: process groups whose least times it asks for.
        asks_findings: whether it asks what the monitor has found.
        process: that reports; what it is in can be seen on its own host when it says nothing any more.
        asks_job_steps: whether it asks when the steps of the job began and ended.
    """

    job: Job
    window: WindowReport
    groups: Annotated[tuple[Key, ...], Meta(max_length=MOST_GROUPS_ASKED)] = ()
    asks_findings: bool = False
    process: Process | None = None
    asks_job_steps: bool = False


class InFlight(Struct, frozen=True, omit_defaults=True):
    """A communication under way, see the mark ``in_flight`` in trace/marks.py."""

    operation: Text
    group: Key
    seq: Key
    peer: Number
    bytes: Key
    dtype: Text | None
    is_async: bool
    start: Instant
    blocking: bool
    state: Text = ""


class OpenPhase(Struct, frozen=True):
    """A phase that has begun and not ended."""

    kind: Text
    name: Text | None
    since: Instant | None


class Activity(Struct, frozen=True):
    """The activity of the training thread, see the mark ``activity`` in trace/marks.py."""

    at: tuple[Number, Number, Number, Number]
    open: Annotated[tuple[OpenPhase, ...], Meta(max_length=64)]
    collectives: Annotated[dict[Annotated[str, Meta(pattern=r"^\d{1,19}$")], Key], Meta(max_length=1_024)]
    p2p: Annotated[tuple[tuple[Key, bool, Number, Count, Key], ...], Meta(max_length=512)]
    frames: Annotated[tuple[Text, ...], Meta(max_length=64)]


class HangReport(Struct, frozen=True):
    """A rank's report when training makes no progress.

    Attributes:
        rank, node, boot_id, backend: who, as in :class:`commtrace.trace.metadata.RankMetadata`.
        time: epoch seconds.
        monotonic_ns: the same instant on the host's monotonic clock.
        quiet_ns: for so long nothing had moved.
        groups, coordinates, parallel, activity, in_flight: as in the rank's own file.
    """

    rank: Rank
    node: Text
    boot_id: Text
    backend: Text
    time: Annotated[float, Meta(ge=0, le=1e11)]
    monotonic_ns: Instant
    quiet_ns: Instant
    groups: Annotated[tuple[GroupMembers, ...], Meta(max_length=MOST_GROUPS)]
    coordinates: Annotated[dict[Text, Number], Meta(max_length=32)]
    parallel: Annotated[dict[Text, Number], Meta(max_length=32)]
    activity: Activity
    in_flight: Annotated[tuple[InFlight, ...], Meta(max_length=MOST_IN_FLIGHT)]


class Hang(Struct, frozen=True, tag="hang"):
    """Training has stopped on a rank, or goes on again.

    Attributes:
        job: of the rank.
        rank: which.
        has_stopped: which of the two.
        report: what the rank is in, if that can be told in a message.
    """

    job: Job
    rank: Rank
    has_stopped: bool
    report: HangReport | None = None


Request: TypeAlias = Report | Hang


class PeerBaseline(Struct, frozen=True):
    """Facts about other ranks that a rank needs.

    Attributes:
        block_steps: how many steps a block has; 0 while that is not known.
        window: the newest one that was joined; −1 before the first.
        work_ns: what a rank of the asking one's stage typically worked per step in it; 0 where there is no other one.
    """

    block_steps: Count = 0
    window: int = -1
    work_ns: Annotated[float, Meta(ge=0, le=1e15)] = 0.0


class Findings(Struct, frozen=True):
    """Findings of a monitor outside of the job, for the exporters of rank 0.

    Attributes:
        stragglers: who is slow now, costliest first.
        events: the newest few, oldest first.
    """

    stragglers: Annotated[tuple[LiveStraggler, ...], Meta(max_length=MOST_EVENTS)] = ()
    events: Annotated[tuple[LiveEvent, ...], Meta(max_length=MOST_EVENTS)] = ()


class Reply(Struct, frozen=True):
    """The answer of the monitor.

    Attributes:
        refused: why it did not take the request; empty if it did.
        baseline: of the other ranks.
        least: of the groups that were asked for.
        findings: if they were asked for.
        job_steps: the newest, if they were asked for.
    """

    refused: Text = ""
    baseline: PeerBaseline = PeerBaseline()
    least: Annotated[tuple[Least, ...], Meta(max_length=MOST_LEAST)] = ()
    findings: Findings = Findings()
    job_steps: Annotated[tuple[JobStep, ...], Meta(max_length=MOST_JOINED)] = ()


_DECODERS: Final = {schema: msgspec.json.Decoder(schema) for schema in (Request, Reply)}
"""Made by one thread, here: two that make the first of a type at once crash (see commtrace/trace/inputs.py)."""


def encoded(message: Request | Reply) -> bytes:
    """Return the message as JSON.

    Raises:
        MessageError: it is too long, or holds text that is no Unicode.
    """
    try:
        body = msgspec.json.encode(message)
    except UnicodeEncodeError as error:
        raise MessageError(f"a message cannot be sent: {error}") from error
    if len(body) > MOST_BYTES:
        raise MessageError(f"a message of {len(body)} bytes is not sent: at most {MOST_BYTES} are read")
    return body


def decoded(body: bytes, schema: Any) -> Any:
    """Return the message in ``body``.

    Args:
        body: JSON.
        schema: ``Request`` or ``Reply``.

    Raises:
        MessageError: it is none.
    """
    try:
        return _DECODERS[schema].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message of this version: {error}") from error


def header(mac: bytes, body: bytes) -> bytes:
    """Return what goes in front of ``body``."""
    return _LENGTH.pack(len(body)) + mac


def read_header(received: bytes) -> tuple[int, bytes]:
    """Return the length of the body that follows, and its MAC.

    Raises:
        MessageError: the body would be too long.
    """
    (length,) = _LENGTH.unpack_from(received)
    if length > MOST_BYTES:
        raise MessageError(f"a message of {length} bytes is not read: at most {MOST_BYTES} are")
    return length, received[_LENGTH.size :]


def mac_of(token: str, direction: bytes, nonces: Sequence[bytes], body: bytes) -> bytes:
    """Return what proves that ``body`` was sent by somebody who knows the token, in this exchange and direction.

    Args:
        token: that the ranks share.
        direction: ``b"request"`` or ``b"reply"``.
        nonces: of the monitor and of the rank.
        body: of the frame.
    """
    return hmac.digest(token.encode(), direction + b"".join(nonces) + body, "sha256")


def check_mac(expected: bytes, received: bytes) -> None:
    """Compare two MACs, in a time that does not depend on where they differ.

    Raises:
        MessageError: they are not equal.
    """
    if not hmac.compare_digest(expected, received):
        raise MessageError("the two sides do not have the same token (COMMTRACE_MONITOR_TOKEN)")
