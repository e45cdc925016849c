"""What ``commtrace doctor`` found, as sentences: what somebody should look at, and what is only good to know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from commtrace.analysis.hangs.diagnosis import Diagnosis, ExaminedRank
from commtrace.analysis.hangs.first_failure import FirstFailure
from commtrace.analysis.hangs.rank_state import SILENT, STOPPED
from commtrace.analysis.hangs.stops import HUNG, UNEQUAL, WAITING
from commtrace.analysis.hangs.story import exception_words, group_words, place_words, silence_words
from commtrace.analysis.matching.mismatches import Mismatch
from commtrace.analysis.rank_words import ranks_in_words, seconds_in_words

_MOST_SILENT: Final = 4


def find_findings(diagnosis: Diagnosis) -> tuple[list[str], list[str]]:
    """What somebody should look at, and what is only good to know."""
    findings = [
        *_first_failure(diagnosis),
        *hang_findings(diagnosis),
        *silence_findings(diagnosis),
        *_endings(diagnosis),
        *_gaps(diagnosis),
        *_mismatches(diagnosis),
    ]
    notes = [*_notes(diagnosis)]
    # What the reader says of missing ranks and torn files is its own; earlier runs in the directory are no fault.
    for problem in diagnosis.problems:
        (notes if "were left out; shown is run" in problem else findings).append(problem)
    return findings, notes


def hang_findings(diagnosis: Diagnosis) -> Iterable[str]:
    stops = diagnosis.hang.stops
    hung = [stop for stop in stops if stop.kind == HUNG]
    roots = [root.rank for root in diagnosis.hang.chains.roots]
    cycles = diagnosis.hang.chains.cycles
    if cycles:
        places = " and ".join(place_words(stops[position]) for position in cycles[0])
        yield f"Deadlock: {len(cycles[0])} communications wait for each other: {places}."
    elif hung and roots:
        waits = "communication waits" if len(hung) == 1 else "communications wait"
        yield f"The job hangs: {len(hung)} {waits} in the end for {ranks_in_words(roots)}."
    elif hung and len(hung[0].operations) > 1:
        called = "; ".join(f"{operation} by {ranks_in_words(own)}" for operation, own in hung[0].operations.items())
        yield f"The job hangs at {place_words(hung[0])}, as which its members called different operations: {called}."
    elif hung:
        yield f"The job hangs in a communication at which all members have arrived: {place_words(hung[0])}."
    for stop in stops:
        if stop.kind == UNEQUAL:
            missing = ranks_in_words(one.rank for one in stop.missing)
            callers = ranks_in_words(stop.arrived).capitalize()
            yield f"{callers} called {place_words(stop)}; {missing} never did."


def silence_findings(diagnosis: Diagnosis, besides: Sequence[int] = ()) -> Iterable[str]:
    """Ranks that say nothing any more though others do, or though their process is there; not those told elsewhere."""
    silent = [one for one in diagnosis.ranks if one.state == SILENT and one.rank not in besides]
    silent.sort(key=lambda one: -(one.behind_ns or 0))  # who fell silent first
    for one in silent[:_MOST_SILENT]:
        yield silence_words(one)
    if len(silent) > _MOST_SILENT:
        yield f"So did {ranks_in_words(one.rank for one in silent[_MOST_SILENT:])}."


def _first_failure(diagnosis: Diagnosis) -> Iterable[str]:
    first = diagnosis.first_failure
    if first is None:
        return
    own = [one for one in diagnosis.ranks if one.rank in first.ranks]
    if first.ended:
        yield _left_early(diagnosis, first)
        return
    if len(own) < len(first.ranks):
        yield _unheard(first, own)
        return
    if first.ahead_ns is not None:
        yield _ended_first(first, own)
        return
    if len(own) > 1:
        yield _several_first(first, own)
        return
    device = f" ({own[0].device_uuid})" if own[0].device_uuid else ""
    who = f"Failed first: rank {own[0].rank} on {own[0].host}{device}"
    if first.raised:
        yield f"{who}, with {exception_words(own[0])}; its message is in the log."
        return
    cut_off = _cut_off(first, "it was")
    # Who was suspended, or held its interpreter, until all were killed leaves the same.
    frozen = ", or frozen until all were killed" if own[0].state == SILENT and not first.cut_off else ""
    yield (
        f"{who}, whose files break off: killed or crashed below Python{frozen}; its log and dmesg say which.{cut_off}"
        f"{_keep_out(own[0])}"
    )


def _left_early(diagnosis: Diagnosis, first: FirstFailure) -> str:
    failed = next(one for one in diagnosis.ranks if one.rank in first.cut_off and one.failures)
    last = failed.failures[-1]
    ranks, them = ranks_in_words(first.ranks), "it" if len(first.ranks) == 1 else "they"
    return (
        f"Left first: {ranks} ended in order, and {them} never came to {last.operation} {last.seq} of the "
        f"{group_words(last.group)}, in which {ranks_in_words(first.cut_off)} failed. See why the script ended "
        "earlier there: fewer batches, a return, sys.exit."
    )


def _ended_first(first: FirstFailure, own: Sequence[ExaminedRank]) -> str:
    milliseconds = round((first.ahead_ns or 0) / 1e6)
    how_long = f"{milliseconds} ms before the next one" if milliseconds else "right before the others"
    hosts = ", ".join(dict.fromkeys(one.host for one in own))
    one_of = "one of " if len(own) > 1 else ""
    return (
        f"Ended first: {one_of}{ranks_in_words(first.ranks)} on {hosts}, {how_long}: all were ended "
        "from outside (scancel, kill, the end of the allocation), or the launcher ended the rest at once: its log says "
        "which."
    )


def _unheard(first: FirstFailure, own: Sequence[ExaminedRank]) -> str:
    """Of ranks without files it is only known that communication of the others failed."""
    unheard = set(first.ranks) - {one.rank for one in own}
    one_of = "one of " if len(first.ranks) > 1 else ""
    failed = ranks_in_words(first.cut_off or [one.rank for one in own if one.exception])
    broken = [one.rank for one in own if not one.exception]
    besides = f", and the files of {ranks_in_words(broken)} break off" if broken else ""
    return (
        f"Failed first: {one_of}{ranks_in_words(first.ranks)}: communication of {failed} failed, there are no "
        f"files of {ranks_in_words(unheard)}{besides}. Killed in its first seconds, or not recorded: the launcher's "
        "log says."
    )


def _several_first(first: FirstFailure, own: Sequence[ExaminedRank]) -> str:
    ranks = ranks_in_words(first.ranks)
    which = 'the launcher\'s log says (torchrun: "first observed failure")'
    if first.together:
        hosts = ", ".join(dict.fromkeys(one.host for one in own))
        commands = "; ".join(dict.fromkeys(one.keep_out for one in own))
        return (
            f"Failed first: {ranks} on {hosts}, whose files break off together: killed, crashed below Python, or "
            f"their host went down; dmesg says which, and if only one of them began it, {which}."
            f"{_cut_off(first, 'they were')} Until it is known why, keep their nodes out of the next job: {commands}."
        )
    raised = [f"rank {one.rank} ended with {exception_words(one)}" for one in own if one.exception]
    broken = ranks_in_words(one.rank for one in own if not one.exception)
    if raised:
        return (
            f"Failed first: one of {ranks}: {'; '.join(raised)}, which may be because another rank was gone; the files "
            f"of {broken} break off. Which came first, {which}."
        )
    return f"Failed first: one of {ranks}, whose files break off; which, {which}."


def _cut_off(first: FirstFailure, gone: str) -> str:
    if not first.cut_off:
        return ""
    return f" {ranks_in_words(first.cut_off).capitalize()} failed because {gone} gone."


def _keep_out(rank: ExaminedRank) -> str:
    """What to do with a node whose rank died without a word: no exception of the program's says why."""
    return f" Until it is known why, keep its node out of the next job: {rank.keep_out}."


def _endings(diagnosis: Diagnosis) -> Iterable[str]:
    first = diagnosis.first_failure.ranks if diagnosis.first_failure else ()
    raised: dict[str, list[int]] = {}
    for one in diagnosis.ranks:
        if one.exception and one.rank not in first:
            raised.setdefault(exception_words(one), []).append(one.rank)
    for exception, own in raised.items():
        yield f"{ranks_in_words(own).capitalize()} ended with {exception}: its message is in the log."
    stopped = [one.rank for one in diagnosis.ranks if one.state == STOPPED and one.rank not in first]
    is_failure = diagnosis.first_failure is not None and diagnosis.first_failure.ahead_ns is None
    if stopped and first and not is_failure:
        yield f"The files of {ranks_in_words(stopped)} break off as well."
    elif stopped and first:
        yield (
            f"The files of {ranks_in_words(stopped)} break off as well: launchers kill the other ranks once one has "
            "failed."
        )
    elif stopped:
        yield (
            f"The files of {ranks_in_words(stopped)} break off: killed, a crash below Python, or a directory that "
            "could not be written any more (the log says so)."
        )


def _gaps(diagnosis: Diagnosis) -> Iterable[str]:
    dropped = {one.rank: sum(one.dropped.values()) for one in diagnosis.drops}
    if dropped:
        yield (
            f"{sum(dropped.values())} spans were dropped on {ranks_in_words(dropped)}: numbers of these ranks are too "
            "small. Raise COMMTRACE_BUFFER_SPANS or record fewer steps; where the disk was full, the log says so."
        )
    differing = diagnosis.run.differing_versions
    for package, versions in differing.items():
        listed = "; ".join(f"{version} on {ranks_in_words(ranks)}" for version, ranks in versions.items())
        yield f"Ranks run different versions of {package}: {listed}."
    if not dropped and not diagnosis.recording and not any(one.state in (STOPPED, SILENT) for one in diagnosis.ranks):
        missing = sum(seen.missing for group in diagnosis.groups for seen in group.collectives)
        if missing:
            yield f"{missing} collectives were launched and are not in the files, and nothing says why."


def _mismatches(diagnosis: Diagnosis) -> Iterable[str]:
    wrong = [one for one in diagnosis.mismatches.first if not one.may_be_right]
    if not wrong:
        return
    first = wrong[0]
    more = diagnosis.mismatches.count - len(diagnosis.mismatches.first)
    places = f"{len(wrong)} place{'s' * (len(wrong) != 1)}" + (f" and up to {more} more" if more else "")
    yield f"Members did not call the same at {places}; first {mismatch_words(first)}."


def mismatch_words(one: Mismatch) -> str:
    """``seq 7 of the dp group of ranks 0–3: all_reduce 40 B float32 by ranks 0–2; broadcast …``."""
    calls = "; ".join(
        " ".join(
            filter(
                None,
                [call.operation, f"{call.bytes} B" if call.bytes is not None else "", call.dtype or ""],
            )
        )
        + f" by {ranks_in_words(call.ranks)}"
        for call in one.calls
    )
    return f"seq {one.seq} of the {group_words(one.group)}: {calls}"


def _notes(diagnosis: Diagnosis) -> Iterable[str]:
    in_deadlock = {position for cycle in diagnosis.hang.chains.cycles for position in cycle}
    for position, stop in enumerate(diagnosis.hang.stops):
        if stop.kind == WAITING and stop.waited_ns and position not in in_deadlock:
            waiters = ranks_in_words(stop.arrived).capitalize()
            yield f"{waiters}: {seconds_in_words(stop.waited_ns)} at {place_words(stop)}, which may be usual."
    harmless = [one for one in diagnosis.mismatches.first if one.may_be_right]
    if harmless:
        first = mismatch_words(harmless[0])
        yield f"Sizes differ at {len(harmless)} places, which is right for sparse tensors only; first {first}."
    for path in diagnosis.coverage.not_visible:
        yield f"Not visible: {path}"
    if diagnosis.alignment.refused:
        yield f"Clocks are not aligned: {diagnosis.alignment.refused}"
