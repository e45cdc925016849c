"""The story of a hang in sentences: from those who wait, through those who are missing, to the root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from commtrace.analysis.hangs.diagnosis import Diagnosis, ExaminedRank
from commtrace.analysis.hangs.rank_state import ENDED, SILENT, LastActivity
from commtrace.analysis.hangs.stops import HUNG, UNEQUAL, WAITING, Link, Stop
from commtrace.analysis.matching.arrivals import GroupLabel
from commtrace.analysis.rank_words import ranks_in_words, seconds_in_words
from commtrace.trace.groups import UNKNOWN_ROLE
from commtrace.trace.processes import GONE, IN_KERNEL, RUNS, SUSPENDED

_MOST_STOPS: Final = 8
MOST_ROOTS: Final = 8
_MOST_PLACES: Final = 4


def group_words(group: GroupLabel) -> str:
    """``tp group of ranks 0–3``; ``group of ranks 0–3`` where nobody said what it is for."""
    ranks = ranks_in_words(group.ranks) if group.ranks else f"id {group.id}"
    return f"group of {ranks}" if group.role == UNKNOWN_ROLE else f"{group.role} group of {ranks}"


class Heard(NamedTuple):
    """How to speak of ranks of which little is known.

    Attributes:
        nothing: of those of which nothing is, after their names.
        last: of silent ones, before what they said last.
    """

    nothing: str
    last: str


_FROM_FILES: Final = Heard("which left no files", "The last it could write, its final second or so being lost")
FROM_REPORTS: Final = Heard("which sent no report of a hang", "At the end of the last window that it reported")


def hang_sentences(diagnosis: Diagnosis, heard: Heard = _FROM_FILES) -> list[str]:
    """Of every stop who arrived, who did not and why; then who is at the root of it.

    Args:
        diagnosis: what was found, without its sentences.
        heard: where it comes from.
    """
    hang = diagnosis.hang
    sentences = [
        sentence
        for position, stop in enumerate(hang.stops[:_MOST_STOPS])
        for sentence in (
            *_stop_sentences(diagnosis, stop, hang.chains.links[position], heard),
            *_flight_sentences(diagnosis, stop, position),
        )
    ]
    more = len(hang.stops) - _MOST_STOPS
    if more > 0:
        sentences.append(f"{more} more communications did not end; --json lists all of them.")
    for cycle in hang.chains.cycles:
        places = " → ".join(place_words(hang.stops[position]) for position in (*cycle, cycle[0]))
        waiting = sorted({rank for position in cycle for rank in hang.stops[position].arrived})
        sentences.append(f"Deadlock: they wait for each other in a circle: {places}.{_places(diagnosis, waiting)}")
    roots = hang.chains.roots
    for root in roots[:MOST_ROOTS]:
        held = f"{root.ranks_held_up} rank{'s' * (root.ranks_held_up != 1)}"
        sentences.append(
            f"Root: rank {root.rank}, for which {held} wait{'s' * (root.ranks_held_up == 1)} in the "
            f"end. {_last_seen(diagnosis, root.rank, heard)}"
        )
    if len(roots) > MOST_ROOTS:
        sentences.append(f"Ranks that wait for nobody, besides: {ranks_in_words(r.rank for r in roots[MOST_ROOTS:])}.")
    return sentences


def place_words(stop: Stop) -> str:
    message = stop.message
    if message is not None:
        tag = f", tag {message.tag}" if message.tag else ""
        sender = "anybody" if message.sender < 0 else f"rank {message.sender}"
        number = "" if stop.seq < 0 else f"message {stop.seq} "
        return f"{number or 'a message '}from {sender} to rank {message.receiver} ({stop.group.role}{tag})"
    return f"seq {stop.seq} of the {group_words(stop.group)}"


def _stop_sentences(diagnosis: Diagnosis, stop: Stop, links: Sequence[Link], heard: Heard) -> Iterable[str]:
    verb = {HUNG: "Hung at", WAITING: "Not ended:", UNEQUAL: "Called by some only:"}[stop.kind]
    called = ", ".join(f"{operation} by {ranks_in_words(ranks)}" for operation, ranks in stop.operations.items())
    there = f" ({called})" if len(stop.operations) > 1 else ""
    operation = f" in {next(iter(stop.operations))}" if len(stop.operations) == 1 else ""
    waited = stop.waited_ns
    since = f", waiting for {seconds_in_words(waited)}" if waited else ""
    longest = stop.longest_before_ns
    usual = f" (the longest before took {seconds_in_words(longest)})" if waited and longest is not None else ""
    yield f"{verb} {place_words(stop)}. Arrived: {ranks_in_words(stop.arrived)}{operation}{there}{since}{usual}."
    if not stop.missing and not stop.unknown:
        inside = sorted(rank for ranks in stop.operations.values() for rank in ranks)
        advice = "Compare what they called" if len(stop.operations) > 1 else "Look at the network"
        yield (
            f"  Nobody is missing: all have called it; not come out of it: {ranks_in_words(inside)}. {advice}."
            f"{_places(diagnosis, inside)}"
        )
        return
    for link in links:
        yield f"  {_link_sentence(diagnosis, stop, link, heard)}"


def _places(diagnosis: Diagnosis, ranks: Iterable[int]) -> str:
    """Where in the program ranks are that wait, those at the same place together."""
    at: dict[str, list[int]] = {}
    for rank in ranks:
        doing = diagnosis.hang.doing.get(rank)
        if doing is not None and doing.at:
            at.setdefault(doing.at, []).append(rank)
    places = [f"{ranks_in_words(own)} at {place}" for place, own in at.items()]
    return f" They are: {'; '.join(places[:_MOST_PLACES])}." if places else ""


def _flight_sentences(diagnosis: Diagnosis, stop: Stop, position: int) -> Iterable[str]:
    """What the flight recorder says: ranks in the same state at the same place together."""
    flight = diagnosis.flight_recorder
    alike: dict[tuple[bool, int, str, str, str], list[int]] = {}
    for one in flight.stops.get(position, ()) if flight else ():
        place = next(iter(one.frames), "")
        key = (one.arrived, one.collective_seq_id, one.operation, one.state, place)
        alike.setdefault(key, []).append(one.rank)
    for (arrived, seq, operation, state, place), ranks in alike.items():
        what = f"{operation} {state} (collective_seq_id {seq})" + (f" from {place}" if place else "")
        when = "" if arrived else "not there; last "
        yield f"  Flight recorder: {ranks_in_words(ranks)}: {when}{what}."


def _link_sentence(diagnosis: Diagnosis, stop: Stop, link: Link, heard: Heard) -> str:
    ranks = link.ranks
    unknown = [rank for rank in ranks if rank in stop.unknown]
    if unknown:
        told_of = {one.rank for one in diagnosis.ranks}
        why = "see below" if told_of.issuperset(unknown) else heard.nothing
        return f"Not known to have arrived: {ranks_in_words(unknown)}, {why}."
    last = {one.rank: one.last_seq for one in stop.missing}
    numbers = sorted({-1 if (seq := last[rank]) is None else seq for rank in ranks})
    reached = (
        "none there yet"
        if numbers[-1] < 0
        else f"last there: seq {numbers[0]}"
        if len(numbers) == 1
        else (f"last there: seq {numbers[0]} to {numbers[-1]}")
    )
    missing = f"Missing: {ranks_in_words(ranks)} ({reached})"
    if link.stuck_in_stop is None:
        told_below = {root.rank for root in diagnosis.hang.chains.roots[:MOST_ROOTS]}
        if set(ranks) <= told_below:
            return f"{missing}, in no communication that is stuck: see the root below."
        return f"{missing}. {_last_seen(diagnosis, ranks[0], heard)}"
    other = diagnosis.hang.stops[link.stuck_in_stop]
    verb = "because it is" if len(ranks) == 1 else "because they are"
    perhaps = "" if link.sure else " perhaps"
    return f"{missing},{perhaps} {verb} inside {place_words(other)}."


def _last_seen(diagnosis: Diagnosis, rank: int, heard: Heard) -> str:
    """What a rank that others wait for was doing."""
    own = diagnosis.rank(rank)
    if own is None:
        return f"Nothing is known of rank {rank}, {heard.nothing}."
    doing = diagnosis.hang.doing.get(rank)
    activity = activity_words(doing)
    if own.state == ENDED:
        how = f"with {exception_words(own)}" if own.exception else "in order"
        return f"Rank {rank} ended {how} and will not come any more{f'; {activity}' if doing else ''}."
    if own.state == SILENT:
        return f"{silence_words(own)} {heard.last}: {activity}."
    return f"Rank {rank}: {activity}."


def exception_words(rank: ExaminedRank) -> str:
    """``an uncaught RuntimeError in all_reduce 302 of the world group of ranks 0–3, at train.py:18 main``."""
    words = f"an uncaught {rank.exception}"
    last = next(reversed(rank.failures), None)
    if last is not None and last.exception == rank.exception:
        words += f" in {last.operation} {last.seq} of the {group_words(last.group)}"
        return f"{words}, at {rank.exception_at}" if rank.exception_at else words
    return f"{words} at {rank.exception_at}" if rank.exception_at else words


def silence_words(rank: ExaminedRank) -> str:
    """Return that a rank is silent, for how long, why, and what to do about it."""
    process = f"process {rank.pid} on {rank.host}" if rank.pid else "its process"
    place = f" at {rank.stack_at or rank.stack[0]}" if rank.stack else ""
    let_none_run = f"code in C{place} let no other thread of Python run"
    why = {
        SUSPENDED: f"{process} is suspended, by SIGSTOP or a debugger; kill -CONT {rank.pid} lets it go on",
        IN_KERNEL: f"{process} is in a call of the kernel that nothing interrupts: a file system or a driver (dmesg)",
        RUNS: f"{process} lives and lets no other thread of Python run"
        f"{f': code in C keeps its lock,{place}' if place else ''}; py-spy dump --native --pid {rank.pid} "
        f"shows {'which' if place else 'where'}",
        GONE: f"{process} is gone" + (f"; before, {let_none_run}" if place else ""),
    }.get(
        rank.process or "",
        f"{let_none_run}; py-spy dump --native --pid {rank.pid} on {rank.host} shows which, if it lives"
        if place
        else f"dead, suspended, or in code that lets no thread run; look for {process}",
    )
    since = "" if rank.behind_ns is None else f" {seconds_in_words(rank.behind_ns)} before the others"
    return f"Rank {rank.rank} gave its last sign of life{since}: {why}."


def activity_words(doing: LastActivity | None) -> str:
    """``in forward, microbatch 3 of step 17, for 41 s, at train.py:12 main``."""
    if doing is None:
        return "it says nothing of what it did"
    words = []
    spans = [f"{one.kind} {one.name}" if one.name != one.kind else one.kind for one in doing.open]
    if spans:
        words.append("inside " + " in ".join(spans[:3]))
    at = (("step", doing.step), ("microbatch", doing.microbatch), ("chunk", doing.chunk), ("stage", doing.stage))
    place = [f"{name} {number}" for name, number in at if number is not None]
    if place:
        words.append(", ".join(place))
    blocking = next((one for one in doing.in_flight if one.blocking), None)
    if blocking is not None:
        words.append(f"blocked in {blocking.operation} {blocking.seq} of the {group_words(blocking.group)}")
    if doing.at:
        words.append(f"at {doing.at}")
    if doing.stood_still_ns:
        words.append(f"nothing new for {seconds_in_words(doing.stood_still_ns)}")
    last = doing.last
    if last is not None and not (spans and blocking):
        number = f" {last.seq}" if last.seq is not None else ""
        role = f" ({last.role})" if last.role else ""
        name = last.name if last.kind in ("collective", "p2p") else " ".join(dict.fromkeys((last.kind, last.name)))
        ago = "" if last.ago_ns is None else f", ended {seconds_in_words(last.ago_ns)} before its last word"
        words.append(f"the last it recorded is {name}{number}{role}{ago}")
    return "; ".join(words) or "it recorded nothing"
