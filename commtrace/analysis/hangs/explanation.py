"""The sentences of ``commtrace doctor``: a hang from the waiting ranks to the root, and other findings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from commtrace.analysis.hangs.diagnosis import Diagnosis, ExaminedRank, ExitCalled
from commtrace.analysis.hangs.first_failure import FirstFailure
from commtrace.analysis.hangs.rank_state import ENDED, SILENT, STOPPED, LastActivity
from commtrace.analysis.hangs.setup import setup_findings
from commtrace.analysis.hangs.stops import HUNG, UNEQUAL, WAITING, Elsewhere, Stop, StopLink
from commtrace.analysis.matching.arrivals import GroupLabel
from commtrace.analysis.matching.mismatches import Mismatch
from commtrace.findings.causes import JOB, RANKS
from commtrace.findings.finding import FAILED, HANG, MISMATCH, RECORDING, Finding, Kind, finding_id, with_own_ids
from commtrace.findings.finding import SILENT as SILENT_RANKS
from commtrace.findings.formatting import format_duration, format_ranks
from commtrace.trace.files.locate import OF_OTHER_RUNS
from commtrace.trace.metadata import IMPORTED_FROM, KINETO, UNKNOWN_ROLE
from commtrace.trace.processes import GONE, IN_KERNEL, RUNS, SUSPENDED

_MOST_STOPS: Final = 8
MOST_ROOTS: Final = 8
_MOST_PLACES: Final = 4

_MOST_SILENT: Final = 4


def group_words(group: GroupLabel) -> str:
    """Return ``tp group of ranks 0–3``; ``group of ranks 0–3`` where its role is unknown.

    A group over several worlds has the name that the program gave it: ``weights group of rank 0 and rank 0 of world
    rollout``.
    """
    role = group.name if group.members and group.role == UNKNOWN_ROLE else group.role
    members = group.words or f"id {group.id}"
    return f"group of {members}" if role in (UNKNOWN_ROLE, "") else f"{role} group of {members}"


def elsewhere_words(member: Elsewhere) -> str:
    """Return ``rank 0 of world rollout``."""
    if member.rank is None:
        return f"member {member.number}, of an unknown world"
    return f"rank {member.rank} of world {member.world}"


class Statement(NamedTuple):
    """A sentence, and the ranks to look at because of it."""

    sentence: str
    ranks: tuple[int, ...] = ()  # empty: the whole job


class Heard(NamedTuple):
    """Wording for ranks without any record, and for the last report of silent ranks."""

    nothing: str
    last: str


_FROM_FILES: Final = Heard("which left no files", "The last it could write, its final second or so being lost")
FROM_REPORTS: Final = Heard("which sent no report of a hang", "At the end of the last window that it reported")


def hang_sentences(diagnosis: Diagnosis, heard: Heard = _FROM_FILES) -> list[str]:
    """Return sentences on every stop (arrived and missing ranks, reasons), then on the roots."""
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
        sentences.append(f"Root: rank {root.rank}, which holds up {held}. {_last_seen(diagnosis, root.rank, heard)}")
    if len(roots) > MOST_ROOTS:
        sentences.append(f"Other ranks that wait for nobody: {format_ranks(r.rank for r in roots[MOST_ROOTS:])}.")
    return sentences


def place_words(stop: Stop) -> str:
    message = stop.message
    if message is not None:
        tag = f", tag {message.tag}" if message.tag else ""
        sender = "anybody" if message.sender < 0 else stop.group.rank_words(message.sender)
        number = "" if stop.seq < 0 else f"message {stop.seq} "
        receiver = stop.group.rank_words(message.receiver)
        return f"{number or 'a message '}from {sender} to {receiver} ({stop.group.role}{tag})"
    return f"seq {stop.seq} of the {group_words(stop.group)}"


def _stop_sentences(diagnosis: Diagnosis, stop: Stop, links: Sequence[StopLink], heard: Heard) -> Iterable[str]:
    verb = {HUNG: "Hung at", WAITING: "Not ended:", UNEQUAL: "Called by some only:"}[stop.kind]
    called = ", ".join(f"{operation} by {format_ranks(ranks)}" for operation, ranks in stop.operations.items())
    there = f" ({called})" if len(stop.operations) > 1 else ""
    operation = f" in {next(iter(stop.operations))}" if len(stop.operations) == 1 else ""
    waited = stop.waited_ns
    since = f", waiting for {format_duration(waited)}" if waited else ""
    longest = stop.longest_before_ns
    usual = f" (the longest before took {format_duration(longest)})" if waited and longest is not None else ""
    yield f"{verb} {place_words(stop)}. Arrived: {format_ranks(stop.arrived)}{operation}{there}{since}{usual}."
    awaited = [member for member in stop.elsewhere if member.has_arrived(stop.seq) is not True]
    for member in awaited:
        yield f"  {_elsewhere_sentence(member, stop.seq)}"
    if not stop.missing and not stop.unknown and not awaited:
        inside = sorted(rank for ranks in stop.operations.values() for rank in ranks)
        advice = "Compare what they called" if len(stop.operations) > 1 else "Look at the network"
        yield (
            f"  No rank is missing: all have launched it; still inside: {format_ranks(inside)}. {advice}."
            f"{_places(diagnosis, inside)}"
        )
        return
    for link in links:
        yield f"  {_link_sentence(diagnosis, stop, link, heard)}"


def _elsewhere_sentence(member: Elsewhere, seq: int) -> str:
    who = elsewhere_words(member)
    if member.launched is None:
        process = f" (process {member.pid} on {member.host})" if member.pid else ""
        return f"Not known to have arrived: {who}{process}: its files are not next to those of this world."
    reached = "none there yet" if member.launched == 0 else f"last there: seq {member.launched - 1}"
    doing = activity_words(member.activity)
    if member.state == ENDED:
        doing = f"ended and will not arrive; {doing}"
    elif member.state == SILENT:
        doing = f"silent; the last it could write: {doing}"
    return f"Missing: {who} ({reached}): {doing}."


def _places(diagnosis: Diagnosis, ranks: Iterable[int]) -> str:
    at: dict[str, list[int]] = {}
    for rank in ranks:
        activity = diagnosis.hang.last_activities.get(rank)
        if activity is not None and activity.at:
            at.setdefault(activity.at, []).append(rank)
    places = [f"{format_ranks(ranks_there)} at {place}" for place, ranks_there in at.items()]
    return f" They are: {'; '.join(places[:_MOST_PLACES])}." if places else ""


def _flight_sentences(diagnosis: Diagnosis, stop: Stop, position: int) -> Iterable[str]:
    flight = diagnosis.flight_recorder
    alike: dict[tuple[bool, int, str, str, str], list[int]] = {}
    for call in flight.stops.get(position, ()) if flight else ():
        frame = next(iter(call.frames), "")
        key = (call.arrived, call.collective_seq_id, call.operation, call.state, frame)
        alike.setdefault(key, []).append(call.rank)
    for (arrived, seq, operation, state, frame), ranks in alike.items():
        what = f"{operation} {state} (collective_seq_id {seq})" + (f" from {frame}" if frame else "")
        when = "" if arrived else "not there; last "
        yield f"  Flight recorder: {format_ranks(ranks)}: {when}{what}."


def _link_sentence(diagnosis: Diagnosis, stop: Stop, link: StopLink, heard: Heard) -> str:
    ranks = link.ranks
    unknown = [rank for rank in ranks if rank in stop.unknown]
    if unknown:
        listed = {examined.rank for examined in diagnosis.ranks}
        why = "see below" if listed.issuperset(unknown) else heard.nothing
        return f"Not known to have arrived: {format_ranks(unknown)}, {why}."
    last = {missing_rank.rank: missing_rank.last_seq for missing_rank in stop.missing}
    numbers = sorted({-1 if (seq := last[rank]) is None else seq for rank in ranks})
    reached = (
        "none there yet"
        if numbers[-1] < 0
        else f"last there: seq {numbers[0]}"
        if len(numbers) == 1
        else (f"last there: seq {numbers[0]} to {numbers[-1]}")
    )
    missing = f"Missing: {format_ranks(ranks)} ({reached})"
    if link.waits_at_stop is None:
        listed_roots = {root.rank for root in diagnosis.hang.chains.roots[:MOST_ROOTS]}
        if set(ranks) <= listed_roots:
            return f"{missing}, in no communication that is stuck: see the root below."
        return f"{missing}. {_last_seen(diagnosis, ranks[0], heard)}"
    next_stop = diagnosis.hang.stops[link.waits_at_stop]
    verb = "because it is" if len(ranks) == 1 else "because they are"
    perhaps = "" if link.is_certain else " perhaps"
    return f"{missing},{perhaps} {verb} inside {place_words(next_stop)}."


def _last_seen(diagnosis: Diagnosis, rank: int, heard: Heard) -> str:
    examined = diagnosis.rank(rank)
    if examined is None:
        return f"Nothing is known of rank {rank}, {heard.nothing}."
    last = diagnosis.hang.last_activities.get(rank)
    activity = activity_words(last)
    if examined.exit is not None:
        return f"Rank {rank} {exit_words(examined.exit)} and will not arrive{f'; {activity}' if last else ''}."
    if examined.state == ENDED:
        how = f"with {exception_words(examined)}" if examined.exception else "cleanly"
        return f"Rank {rank} ended {how} and will not arrive{f'; {activity}' if last else ''}."
    if examined.state == SILENT:
        return f"{silence_words(examined)} {heard.last}: {activity}."
    return f"Rank {rank}: {activity}."


def exception_words(rank: ExaminedRank) -> str:
    """Return ``an uncaught RuntimeError in all_reduce 302 of the world group of ranks 0–3, at train.py:18 main``."""
    words = f"an uncaught {rank.exception}"
    last = next(reversed(rank.failures), None)
    if last is not None and last.exception == rank.exception:
        words += f" in {last.operation} {last.seq} of the {group_words(last.group)}"
        return f"{words}, at {rank.exception_at}" if rank.exception_at else words
    return f"{words} at {rank.exception_at}" if rank.exception_at else words


def exit_words(exit_: ExitCalled) -> str:
    """Return ``called os._exit(1) at train.py:31 main``, with the exception or the signal that it was called for."""
    handled = "" if exit_.exception is None else f" while it handled a {exit_.exception}"
    handler = "" if exit_.signal is None else f" in a handler of {exit_.signal}"
    where = "" if exit_.at is None else f" {'of' if exit_.exception else 'at'} {exit_.at}"
    return f"called os._exit({exit_.status}){handler}{handled}{where}"


def silence_words(rank: ExaminedRank) -> str:
    """Return a sentence on a silent rank: for how long, why, and the remedy."""
    process = f"process {rank.pid} on {rank.host}" if rank.pid else "its process"
    where = f" at {rank.stack_at or rank.stack[0]}" if rank.stack else ""
    let_none_run = f"code in C{where} let no other thread of Python run"
    why = {
        SUSPENDED: f"{process} is suspended, by SIGSTOP or a debugger; kill -CONT {rank.pid} lets it go on",
        IN_KERNEL: f"{process} is in a call of the kernel that nothing interrupts: a file system or a driver (dmesg)",
        RUNS: f"{process} lives and lets no other thread of Python run"
        f"{f': code in C keeps its lock,{where}' if where else ''}; py-spy dump --native --pid {rank.pid} "
        f"shows {'which' if where else 'where'}",
        GONE: f"{process} is gone" + (f"; before, {let_none_run}" if where else ""),
    }.get(
        rank.process or "",
        f"{let_none_run}; py-spy dump --native --pid {rank.pid} on {rank.host} shows which, if it lives"
        if where
        else f"dead, suspended, or in code that lets no thread run; look for {process}",
    )
    since = "" if rank.behind_ns is None else f" {format_duration(rank.behind_ns)} before the others"
    return f"Rank {rank.rank} gave its last sign of life{since}: {why}."


def activity_words(activity: LastActivity | None) -> str:
    """Return ``in forward, microbatch 3 of step 17, for 41 s, at train.py:12 main``."""
    if activity is None:
        return "its activity is unknown"
    words = []
    spans = [f"{phase.kind} {phase.name}" if phase.name != phase.kind else phase.kind for phase in activity.open]
    if spans:
        words.append("inside " + " in ".join(spans[:3]))
    at = (
        ("step", activity.step),
        ("microbatch", activity.microbatch),
        ("chunk", activity.chunk),
        ("stage", activity.stage),
    )
    numbers = [f"{name} {number}" for name, number in at if number is not None]
    if numbers:
        words.append(", ".join(numbers))
    blocking = next((communication for communication in activity.in_flight if communication.blocking), None)
    if blocking is not None:
        words.append(f"blocked in {blocking.operation} {blocking.seq} of the {group_words(blocking.group)}")
    elif activity.in_flight and activity.no_progress_ns is None and not spans:
        call = activity.in_flight[0]
        words.append(f"{call.operation} {call.seq} of the {group_words(call.group)} had not ended")
    if activity.at:
        words.append(f"at {activity.at}")
    if activity.no_progress_ns:
        words.append(f"no progress for {format_duration(activity.no_progress_ns)}")
    last = activity.last
    if last is not None and not (spans and blocking):
        number = f" {last.seq}" if last.seq is not None else ""
        role = f" ({last.role})" if last.role else ""
        name = last.name if last.kind in ("collective", "p2p") else " ".join(dict.fromkeys((last.kind, last.name)))
        ago = "" if last.ago_ns is None else f", ended {format_duration(last.ago_ns)} before its last write"
        words.append(f"last recorded: {name}{number}{role}{ago}")
    return "; ".join(words) or "it recorded nothing"


def find_findings(diagnosis: Diagnosis, limits: Collection[str] = ()) -> tuple[list[Finding], list[str]]:
    """Return the findings, which need attention, and the notes, which do not.

    Args:
        limits: problems that are limits of the source of an imported run.
    """
    hosts = {rank.rank: rank.host for rank in diagnosis.ranks}
    notes = [*_notes(diagnosis)]
    # The reader reports missing ranks and torn files; earlier runs in the directory are no fault.
    problems: list[str] = []
    for problem in diagnosis.problems:
        (notes if problem in limits or OF_OTHER_RUNS in problem else problems).append(problem)
    told = (
        (FAILED, _first_failure(diagnosis)),
        (HANG, _hangs(diagnosis)),
        (MISMATCH, _unequal_calls(diagnosis.hang.stops)),
        (HANG, _setup_hang(diagnosis)),
        (SILENT_RANKS, silence_findings(diagnosis)),
        (FAILED, _uncaught(diagnosis)),
        (RECORDING, map(Statement, _broken_off(diagnosis))),
        (RECORDING, map(Statement, _gaps(diagnosis))),
        (MISMATCH, map(Statement, _mismatches(diagnosis))),
        (RECORDING, map(Statement, problems)),
    )
    findings = [_finding(kind, statement, hosts) for kind, statements in told for statement in statements]
    return [*with_own_ids(findings)], notes


def _finding(kind: Kind, statement: Statement, hosts: Mapping[int, str]) -> Finding:
    ranks = statement.ranks
    return Finding(
        id=finding_id(kind, RANKS if ranks else JOB, "", ranks),
        kind=kind,
        place=RANKS if ranks else JOB,
        who=format_ranks(ranks) if ranks else "the job",
        ranks=ranks,
        hosts=tuple(dict.fromkeys(hosts[rank] for rank in ranks if hosts.get(rank))),
        evidence=statement.sentence,
    )


def hang_findings(diagnosis: Diagnosis) -> Iterable[Statement]:
    """Yield what hangs, and the calls that only some ranks made."""
    yield from _hangs(diagnosis)
    yield from _unequal_calls(diagnosis.hang.stops)


def _hangs(diagnosis: Diagnosis) -> Iterable[Statement]:
    stops = diagnosis.hang.stops
    hung = [stop for stop in stops if stop.kind == HUNG]
    roots = [root.rank for root in diagnosis.hang.chains.roots]
    cycles = diagnosis.hang.chains.cycles
    awaited = _awaited_elsewhere(hung)
    if cycles:
        places = " and ".join(place_words(stops[position]) for position in cycles[0])
        yield Statement(f"Deadlock: {len(cycles[0])} communications wait for each other: {places}.")
    elif hung and (roots or awaited):
        held = "communication is" if len(hung) == 1 else "communications are"
        ends = " and ".join([*([format_ranks(roots)] if roots else []), *awaited])
        yield Statement(f"The job hangs: {len(hung)} {held} held up by {ends}.", tuple(roots))
    elif hung and len(hung[0].operations) > 1:
        called = "; ".join(f"{operation} by {format_ranks(ranks)}" for operation, ranks in hung[0].operations.items())
        place = place_words(hung[0])
        yield Statement(f"The job hangs at {place}, as which its members called different operations: {called}.")
    elif hung:
        place = place_words(hung[0])
        yield Statement(f"The job hangs in a communication at which all members have arrived: {place}.")


def _unequal_calls(stops: Sequence[Stop]) -> Iterable[Statement]:
    for stop in stops:
        if stop.kind == UNEQUAL:
            missing = format_ranks(missing_rank.rank for missing_rank in stop.missing)
            callers = format_ranks(stop.arrived).capitalize()
            yield Statement(f"{callers} called {place_words(stop)}; {missing} never did.", tuple(stop.arrived))


def _awaited_elsewhere(hung: Sequence[Stop]) -> list[str]:
    """Return the members of other worlds that are waited for, those of which it is certain if there are any."""
    members = [(member, member.has_arrived(stop.seq)) for stop in hung for member in stop.elsewhere]
    missing = [member for member, arrived in members if arrived is False]
    unknown = [member for member, arrived in members if arrived is None]
    if missing or not unknown:
        return list(dict.fromkeys(map(elsewhere_words, missing)))
    words = list(dict.fromkeys(map(elsewhere_words, unknown)))
    return words if len(words) == 1 else [f"one of {', '.join(words)}"]


def _setup_hang(diagnosis: Diagnosis) -> Iterable[Statement]:
    hang = diagnosis.setup_hang
    sentences = [*setup_findings(hang, {rank.rank: rank.state for rank in diagnosis.ranks})] if hang is not None else []
    if hang is not None and sentences:
        yield Statement(" ".join(sentences), tuple(hang.missing))


def silence_findings(diagnosis: Diagnosis, besides: Sequence[int] = ()) -> Iterable[Statement]:
    """Yield the ranks that are silent though others write or their process lives, but for those ``besides``."""
    silent = _silent(diagnosis, besides)
    for rank in silent[:_MOST_SILENT]:
        yield Statement(silence_words(rank), (rank.rank,))
    if len(silent) > _MOST_SILENT:
        rest = tuple(rank.rank for rank in silent[_MOST_SILENT:])
        yield Statement(f"So did {format_ranks(rest)}.", rest)


def _silent(diagnosis: Diagnosis, besides: Sequence[int]) -> list[ExaminedRank]:
    """Return the silent ranks, the first to fall silent first."""
    silent = [
        rank for rank in diagnosis.ranks if rank.state == SILENT and rank.exit is None and rank.rank not in besides
    ]
    return sorted(silent, key=lambda rank: -(rank.behind_ns or 0))


def _first_failure(diagnosis: Diagnosis) -> Iterable[Statement]:
    first = diagnosis.first_failure
    if first is not None:
        yield Statement(_first_words(diagnosis, first), tuple(first.ranks))


def _first_words(diagnosis: Diagnosis, first: FirstFailure) -> str:
    examined = [rank for rank in diagnosis.ranks if rank.rank in first.ranks]
    if first.ended:
        return _left_early(diagnosis, first)
    if len(examined) < len(first.ranks):
        return _unheard(first, examined)
    if first.ahead_ns is not None:
        return _ended_first(first, examined)
    if len(examined) > 1:
        return _several_first(first, examined)
    device = f" ({examined[0].device_uuid})" if examined[0].device_uuid else ""
    who = f"Failed first: rank {examined[0].rank} on {examined[0].host}{device}"
    if examined[0].exit is not None:
        return f"{who}, which {exit_words(examined[0].exit)}; its log says why.{_cut_off(first, 'it was')}"
    if first.raised:
        return f"{who}, with {exception_words(examined[0])}; its message is in the log."
    cut_off = _cut_off(first, "it was")
    # A rank that was suspended, or held its interpreter, until all were killed leaves the same.
    frozen = ", or frozen until all were killed" if examined[0].state == SILENT and not first.cut_off else ""
    return (
        f"{who}, whose files break off: killed or crashed below Python{frozen}; its log and dmesg say which.{cut_off}"
        f"{_exclusion(examined[0])}"
    )


def _left_early(diagnosis: Diagnosis, first: FirstFailure) -> str:
    failed = next(rank for rank in diagnosis.ranks if rank.rank in first.cut_off and rank.failures)
    last = failed.failures[-1]
    ranks, them = format_ranks(first.ranks), "it" if len(first.ranks) == 1 else "they"
    return (
        f"Left first: {ranks} ended cleanly, and {them} never came to {last.operation} {last.seq} of the "
        f"{group_words(last.group)}, in which {format_ranks(first.cut_off)} failed. See why the script ended "
        "earlier there: fewer batches, a return, sys.exit."
    )


def _ended_first(first: FirstFailure, examined: Sequence[ExaminedRank]) -> str:
    milliseconds = round((first.ahead_ns or 0) / 1e6)
    how_long = f"{milliseconds} ms before the next one" if milliseconds else "right before the others"
    hosts = ", ".join(dict.fromkeys(rank.host for rank in examined))
    one_of = "one of " if len(examined) > 1 else ""
    return (
        f"Ended first: {one_of}{format_ranks(first.ranks)} on {hosts}, {how_long}: all were ended "
        "from outside (scancel, kill, the end of the allocation), or the launcher ended the rest at once: its log says "
        "which."
    )


def _unheard(first: FirstFailure, examined: Sequence[ExaminedRank]) -> str:
    """Return that others' communication failed: nothing else is known of ranks without files."""
    unheard = set(first.ranks) - {rank.rank for rank in examined}
    one_of = "one of " if len(first.ranks) > 1 else ""
    failed = format_ranks(first.cut_off or [rank.rank for rank in examined if _raised(rank)])
    broken = [rank.rank for rank in examined if not _raised(rank)]
    besides = f", and the files of {format_ranks(broken)} break off" if broken else ""
    return (
        f"Failed first: {one_of}{format_ranks(first.ranks)}: communication of {failed} failed, there are no "
        f"files of {format_ranks(unheard)}{besides}. Killed in its first seconds, or not recorded: the launcher's "
        "log says."
    )


def _several_first(first: FirstFailure, examined: Sequence[ExaminedRank]) -> str:
    ranks = format_ranks(first.ranks)
    which = 'the launcher\'s log says (torchrun: "first observed failure")'
    if first.together:
        hosts = ", ".join(dict.fromkeys(rank.host for rank in examined))
        commands = "; ".join(dict.fromkeys(rank.exclude_nodes for rank in examined))
        return (
            f"Failed first: {ranks} on {hosts}, whose files break off together: killed, crashed below Python, or "
            f"their host went down; dmesg says which, and if only one of them began it, {which}."
            f"{_cut_off(first, 'they were')} Until it is known why, keep their nodes out of the next job: {commands}."
        )
    raised = [
        f"rank {rank.rank} {exit_words(rank.exit) if rank.exit is not None else f'ended with {exception_words(rank)}'}"
        for rank in examined
        if _raised(rank)
    ]
    broken = format_ranks(rank.rank for rank in examined if not _raised(rank))
    if raised:
        return (
            f"Failed first: one of {ranks}: {'; '.join(raised)}, which may be because another rank was gone; the files "
            f"of {broken} break off. Which came first, {which}."
        )
    return f"Failed first: one of {ranks}, whose files break off; which, {which}."


def _raised(rank: ExaminedRank) -> bool:
    return bool(rank.exception or (rank.exit is not None and rank.exit.exception))


def _cut_off(first: FirstFailure, gone: str) -> str:
    if not first.cut_off:
        return ""
    return f" {format_ranks(first.cut_off).capitalize()} failed because {gone} gone."


def _exclusion(rank: ExaminedRank) -> str:
    return f" Until it is known why, keep its node out of the next job: {rank.exclude_nodes}."


def _uncaught(diagnosis: Diagnosis) -> Iterable[Statement]:
    first = diagnosis.first_failure.ranks if diagnosis.first_failure else ()
    raised: dict[str, list[int]] = {}
    for rank in diagnosis.ranks:
        if rank.exception and rank.rank not in first:
            raised.setdefault(exception_words(rank), []).append(rank.rank)
    for exception, ranks in raised.items():
        who = format_ranks(ranks).capitalize()
        yield Statement(f"{who} ended with {exception}: its message is in the log.", tuple(ranks))
    exits: dict[str, list[int]] = {}
    for rank in diagnosis.ranks:
        if rank.exit is not None and rank.rank not in first:
            exits.setdefault(exit_words(rank.exit), []).append(rank.rank)
    for call, ranks in exits.items():
        yield Statement(f"{format_ranks(ranks).capitalize()} {call}.", tuple(ranks))


def _broken_off(diagnosis: Diagnosis) -> Iterable[str]:
    first = diagnosis.first_failure.ranks if diagnosis.first_failure else ()
    stopped = [
        rank.rank for rank in diagnosis.ranks if rank.state == STOPPED and rank.exit is None and rank.rank not in first
    ]
    is_failure = diagnosis.first_failure is not None and diagnosis.first_failure.ahead_ns is None
    if stopped and first and not is_failure:
        yield f"The files of {format_ranks(stopped)} break off as well."
    elif stopped and first:
        yield (
            f"The files of {format_ranks(stopped)} break off as well: launchers kill the other ranks once one has "
            "failed."
        )
    elif stopped:
        yield (
            f"The files of {format_ranks(stopped)} break off: killed, a crash below Python, or a directory that "
            "could not be written any more (the log says so)."
        )


def _gaps(diagnosis: Diagnosis) -> Iterable[str]:
    dropped = {drops.rank: sum(drops.dropped.values()) for drops in diagnosis.drops}
    if dropped:
        yield (
            f"{sum(dropped.values())} spans were dropped on {format_ranks(dropped)}: numbers of these ranks are too "
            "small. Raise COMMTRACE_BUFFER_SPANS or record fewer steps; where the disk was full, the log says so."
        )
    differing = diagnosis.run.differing_versions
    for package, versions in differing.items():
        listed = "; ".join(f"{version} on {format_ranks(ranks)}" for version, ranks in versions.items())
        yield f"Ranks run different versions of {package}: {listed}."
    is_window = diagnosis.run.versions.get(IMPORTED_FROM) == KINETO  # whose kernels need not all have numbers
    breaks_off = any(rank.state in (STOPPED, SILENT) for rank in diagnosis.ranks)
    if not (dropped or diagnosis.recording or is_window or breaks_off):
        missing = sum(seen.missing for group in diagnosis.groups for seen in group.collectives)
        if missing:
            yield f"{missing} collectives were launched and are not in the files, and nothing says why."


def _mismatches(diagnosis: Diagnosis) -> Iterable[str]:
    wrong = [mismatch for mismatch in diagnosis.mismatches.first if not mismatch.may_be_harmless]
    if not wrong:
        return
    first = wrong[0]
    more = diagnosis.mismatches.count - len(diagnosis.mismatches.first)
    places = f"{len(wrong)} place{'s' * (len(wrong) != 1)}" + (f" and up to {more} more" if more else "")
    yield f"Members did not call the same at {places}; first {mismatch_words(first)}."


def mismatch_words(mismatch: Mismatch) -> str:
    """Return ``seq 7 of the dp group of ranks 0–3: all_reduce 40 B float32 by ranks 0–2; broadcast …``."""
    calls = "; ".join(
        " ".join(
            filter(
                None,
                [call.operation, f"{call.bytes} B" if call.bytes is not None else "", call.dtype or ""],
            )
        )
        + f" by {format_ranks(call.ranks)}"
        for call in mismatch.calls
    )
    return f"seq {mismatch.seq} of the {group_words(mismatch.group)}: {calls}"


def _notes(diagnosis: Diagnosis) -> Iterable[str]:
    in_deadlock = {position for cycle in diagnosis.hang.chains.cycles for position in cycle}
    for position, stop in enumerate(diagnosis.hang.stops):
        if stop.kind == WAITING and stop.waited_ns and position not in in_deadlock:
            waiters = format_ranks(stop.arrived).capitalize()
            yield f"{waiters}: {format_duration(stop.waited_ns)} at {place_words(stop)}, which may be usual."
    harmless = [mismatch for mismatch in diagnosis.mismatches.first if mismatch.may_be_harmless]
    if harmless:
        first = mismatch_words(harmless[0])
        yield f"Sizes differ at {len(harmless)} places, which is right for sparse tensors only; first {first}."
    hidden = [rank.rank for rank in diagnosis.ranks if rank.shell_hides_end and rank.state in (STOPPED, SILENT)]
    if hidden:
        yield (
            f"The command ended with exit code 0, but a shell had started {format_ranks(hidden)}: that does not say "
            "how they ended, as in `torchrun … || true` or `torchrun … | tee log`. Their files break off like those of "
            "killed ranks. Only a process that ends by _exit in C leaves the same."
        )
    for group in diagnosis.groups:
        if group.group.members:
            has = "has" if any(member.world for member in group.group.members) else "may have"
            yield (
                f"The {group_words(group.group)} {has} members of another world, which are recorded apart: how long "
                "they wait for each other is not known from the files of this one."
            )
    ended = [rank.rank for rank in diagnosis.ranks if rank.launcher]
    if ended:
        yield (
            f"The files of {format_ranks(ended)} have no end: Ray kills its actors when it is done with them. It ended "
            "all ranks together, and none was in a communication; the last second may be missing. An actor that calls "
            "torch.distributed.destroy_process_group() or commtrace.stop() at the end of its work writes it."
        )
    for path in diagnosis.coverage.not_visible:
        yield f"Not visible: {path}"
    if diagnosis.alignment.refused:
        yield f"Clocks are not aligned: {diagnosis.alignment.refused}"
