"""Find the rank that failed first in a job that ended badly, as far as the files show.

A rank whose communication failed was cut off by another one, and a rank that raised torch's error for a lost peer may
have been: neither comes before a rank that broke off without an exception, nor before one that ended cleanly and never
came to that communication. A rank that raised another exception, or called os._exit with a status other than 0, ended
by itself. Launchers kill the rest a tenth of a second after a failure: one that breaks off comes before one that ended
by itself only if peers saw that, or if it had been silent for longer than any healthy rank is. A rank that saw another
one end comes after it. Peers' notes of an end decide alone only if they look like a launcher's work, not like ranks
that were all ended from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from commtrace.analysis.clocks.time_of_day import wall_clock_ns
from commtrace.analysis.hangs.rank_state import ENDED, RUNNING, SILENT, STOPPED, Ending, is_late
from commtrace.analysis.hangs.stops import HUNG, Stop
from commtrace.analysis.matching.arrivals import RankArrivals, known_groups
from commtrace.trace.processes import GONE
from commtrace.trace.run import PeerLook, RankTrace, Run

_ALIVE_NS: Final = 1_000_000_000
"""A rank that wrote so long after a hang had begun was alive in it, whatever the clocks of hosts differ by."""

_LAUNCHER_NS: Final = 10_000_000
"""scancel, or a kill of all ranks, takes milliseconds; torchrun polls every 100 ms, and most others less often."""

_TIMES_LATER: Final = 2
"""Ranks ended one by one have similar gaps between all ends; a launcher kills the rest without waiting."""

_OF_COMMUNICATION: Final = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"})
"""Exceptions that torch raises where another rank, or the network, is at fault."""


_OF_LOST_PEERS: Final = "RuntimeError"
"""Raised in C++ where a connection breaks, and in many other cases."""

_WAIT_FOR_OTHERS: Final = ("/torch/autograd/", "/torch/distributed/")
"""Innermost frames of exceptions that communication in C++ may have raised."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The rank that failed first; several if they failed together, or if nothing shows which."""

    ranks: tuple[int, ...]
    raised: bool  # it ended with an exception of its own, or by os._exit; else its files break off, or there are none
    cut_off: tuple[int, ...]  # ranks whose communication failed because of it
    together: bool = False  # several ranks were gone at the same time
    ended: bool = False  # cleanly, without coming to the communication in which the others failed
    ahead_ns: int | None = None  # to the next end (0: right before it) if no failure is known; else None


def find_first_failure(
    run: Run, arrivals: Mapping[int, RankArrivals], endings: Mapping[int, Ending], stops: Sequence[Stop]
) -> FirstFailure | None:
    """Return the first failure; None if no rank failed, all did alike, or nothing shows which."""
    if run.world_size < 2:
        return None
    goes_on = any(ending.state == RUNNING for ending in endings.values())
    bad = {rank: ending for rank, ending in endings.items() if _ended_badly(ending, goes_on)}
    if any(run.ranks[rank].stack for rank in bad):
        return None  # Code in C hung one of them, and the job was ended because of that.
    cut_off = tuple(rank for rank in bad if _was_cut_off(run.ranks[rank]))
    raised = [rank for rank, ending in bad.items() if rank not in cut_off and _ended_itself(rank, ending, stops)]
    broken = tuple(rank for rank in bad if rank not in cut_off and rank not in raised)
    victims = tuple(rank for rank in raised if _may_be_cut_off(run.ranks[rank]))
    lost = tuple(sorted((*cut_off, *victims)))
    left = _left_early(run, arrivals, endings, cut_off)
    ended_cleanly = {rank for rank, ending in endings.items() if ending.state == ENDED and not ending.exception}
    later = _later(run, bad, broken, lost)
    candidates, is_told = _not_ended_by_signals(run, tuple(rank for rank in broken if rank not in later))
    own = [rank for rank in raised if rank not in victims]
    own = [rank for rank in own if rank not in later] or own
    signs = {rank: _last_sign_ns(run.ranks[rank], ending) for rank, ending in endings.items()}
    earliest = _surely_first(run, candidates, signs, ended_cleanly - {*left})
    gone, agreed = _gone_at_first(run, earliest or (*candidates, *own), lost)
    if {*gone} & {*own} or not _is_comparable(run, gone, {*own} - later):
        gone, own = (), [rank for rank in own if rank in gone] or own
    if not lost and not raised and _hung_before(gone or earliest, stops, endings):
        return None  # The end of a job that hung does not show why it hung.
    if gone and not (earliest or lost or raised or is_told):
        ahead_ns, is_alone = _ahead(run, gone)
        if not is_alone:
            return FirstFailure(gone, False, (), ahead_ns=ahead_ns)
    if gone or earliest:
        together = len(gone or earliest) > 1 and (agreed or not gone)
        return FirstFailure(gone or earliest, False, lost, together)
    if is_told and not own:
        return FirstFailure(candidates, False, lost, together=len(candidates) > 1)
    if own and (lost or broken or len({endings[rank].failure for rank in raised}) > 1):
        first = min(own, key=lambda rank: (signs[rank] is None, signs[rank]))
        return FirstFailure((first,), True, cut_off)
    if left:
        return FirstFailure(left, False, lost, ended=True)
    unheard = _unheard(run)
    silent = tuple(sorted({*candidates, *unheard}))
    if silent and (cut_off or len(victims) > 1):
        together = len(silent) > 1 and not unheard and _are_whole_hosts(run, candidates)
        return FirstFailure(silent, False, lost, together)
    if silent and victims:
        return FirstFailure(tuple(sorted((*victims, *silent))), False, ())
    if victims and (cut_off or broken):  # which were there after one of these had ended
        first = min(victims, key=lambda rank: (signs[rank] is None, signs[rank]))
        return FirstFailure((first,), True, cut_off)
    return None


def _not_ended_by_signals(run: Run, broken: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Leave out the ranks that were sent a signal before they ended, if it is known of one that it was sent none.

    Return those that are left, and whether any was left out.
    """
    signals = {rank: run.ranks[rank].end_signal for rank in broken}
    if 0 not in signals.values() or not any(signals.values()):
        return broken, False
    return tuple(rank for rank in broken if not signals[rank]), True


def _ended_badly(ending: Ending, goes_on: bool) -> bool:
    if ending.failure or ending.state == STOPPED:
        return True
    # A process on another host is unknown: while the job goes on, it may only be frozen.
    return ending.state == SILENT and (ending.process == GONE or (ending.process is None and not goes_on))


def _was_cut_off(trace: RankTrace) -> bool:
    exception, _ = _exception(trace)
    if exception in _OF_COMMUNICATION:
        return True
    # One that failed and was caught says nothing of the exception that ended the rank.
    return bool(trace.failures) and exception in ("", trace.failures[-1].exception)


def _may_be_cut_off(trace: RankTrace) -> bool:
    """Return whether its exception may be of a communication in C++, which no hook sees fail."""
    exception, frames = _exception(trace)
    innermost = next(iter(frames), "")
    return exception == _OF_LOST_PEERS and (not innermost or any(part in innermost for part in _WAIT_FOR_OTHERS))


def _exception(trace: RankTrace) -> tuple[str, tuple[str, ...]]:
    """Return the type of the exception that ended the rank, or that it called os._exit for, and its frames."""
    if trace.exit is not None:
        return trace.exit.exception, trace.exit.frames
    return trace.exception, trace.exception_frames


def _ended_itself(rank: int, ending: Ending, stops: Sequence[Stop]) -> bool:
    if ending.exception or ending.exit is None:
        return bool(ending.exception)
    # What calls os._exit in a rank that waits in a hang is a watchdog, which has found that others do not come.
    return not any(stop.kind == HUNG and rank in stop.arrived for stop in stops)


def _later(run: Run, bad: Collection[int], broken: Collection[int], lost: Collection[int]) -> set[int]:
    """Return ranks that ended after another one had failed, as looks at the processes of a host show."""
    later = set[int]()
    for rank, trace in run.ranks.items():
        seen = set[int]()
        for look in trace.gone_peers:
            ended = {*bad} & {*look.ended}
            # The end of a rank that was cut off says nothing of the order of others: their failure may be its cause.
            if seen - {*lost}:
                later |= ended - seen
            seen |= ended
        if seen if rank in broken else seen - {*lost}:
            later.add(rank)
    return later


def _last_sign_ns(trace: RankTrace, ending: Ending) -> int | None:
    """Return when the rank was alive for certain, epoch ns: at its last write, or at a later look at its peers."""
    if ending.last_ns is None:
        return None
    return max([ending.last_ns, *(wall_clock_ns(trace, look.at_ns) for look in trace.gone_peers)])


def _is_comparable(run: Run, gone: Collection[int], own: Collection[int]) -> bool:
    """Return whether these ranks, that others saw end, are on the hosts of those that ended by themselves.

    On another host, its launcher may have killed them because of that.
    """
    nodes = {run.ranks[rank].metadata.node for rank in gone}
    return all(run.ranks[rank].metadata.node in nodes for rank in own)


def _gone_at_first(run: Run, broken: Collection[int], lost: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Return the broken ranks that others saw end first, and whether all observers agree."""
    seen = []
    for one in run.ranks.values():
        # The launcher kills the others soon, so the first look that found an end counts. If that was
        # a rank that had been cut off, the cause was on another host, or not seen.
        look = next((look.ended for look in one.gone_peers if not {*broken, *lost}.isdisjoint(look.ended)), ())
        if look and set(lost).isdisjoint(look):
            seen.append(set(broken) & set(look))
    agreed = set.intersection(*seen) if seen else set[int]()
    return tuple(sorted(agreed or set[int]().union(*seen))), bool(agreed)


def _ahead(run: Run, first: Collection[int]) -> tuple[int, bool]:
    """Return the time from the first end to the next, and whether a launcher may have caused the next one."""
    ahead, is_alone = [], []
    for looks in _looks_by_node(run):
        seen = sorted((look.at_ns, rank) for look in looks for rank in look.ended)
        ends = dict[int, int]()
        for at_ns, rank in seen:
            ends.setdefault(rank, at_ns)
        own = [at_ns for rank, at_ns in ends.items() if rank in first]
        if not own:
            continue
        others = sorted(at_ns for rank, at_ns in ends.items() if rank not in first)
        # Without another end, ranks were still there at the last look.
        times = [min(own), *others, max(look.at_ns for look in looks)]
        gap, *later = [after - before for before, after in itertools.pairwise(times)]
        ahead.append(gap)
        is_alone.append(gap >= _LAUNCHER_NS and gap >= _TIMES_LATER * max(later, default=0))
    return min(ahead, default=0), bool(is_alone) and all(is_alone)


def _looks_by_node(run: Run) -> list[list[PeerLook]]:
    looks: dict[str, list[PeerLook]] = {}
    for trace in run.ranks.values():
        looks.setdefault(trace.metadata.node, []).extend(trace.gone_peers)
    return list(looks.values())


def _hung_before(ranks: Collection[int], stops: Sequence[Stop], endings: Mapping[int, Ending]) -> bool:
    last = [ending.last_ns for rank in ranks if (ending := endings[rank]).last_ns is not None]
    for stop in stops:
        words = [ending.last_ns for rank in stop.arrived if (ending := endings[rank]).last_ns is not None]
        if stop.kind != HUNG or stop.waited_ns is None or not (last and words):
            continue
        if max(words) - stop.waited_ns < min(last) - _ALIVE_NS:
            return True
    return False


def _left_early(
    run: Run, arrivals: Mapping[int, RankArrivals], endings: Mapping[int, Ending], cut_off: Collection[int]
) -> tuple[int, ...]:
    """Return ranks that ended cleanly before a communication in which another one failed."""
    groups = known_groups(run)
    left = set[int]()
    for failure in (run.ranks[rank].failures[-1] for rank in cut_off if run.ranks[rank].failures):
        group, peer = groups.get(failure.group), failure.peer
        members = (peer,) if peer >= 0 else group.ranks if group is not None else ()
        for rank in members:
            if rank in endings and endings[rank].state == ENDED and not endings[rank].exception:
                come = arrivals[rank].launched.get(failure.group, 0) > failure.seq
                if peer >= 0 or not come:
                    left.add(rank)
    return tuple(sorted(left))


def _unheard(run: Run) -> set[int]:
    """Return ranks killed before they wrote files; none if most are missing, as their files are elsewhere."""
    unheard = set(range(run.world_size)) - set(run.ranks)
    return unheard if len(unheard) <= len(run.ranks) else set()


def _are_whole_hosts(run: Run, ranks: Collection[int]) -> bool:
    nodes = {run.ranks[rank].metadata.node for rank in ranks}
    return all(rank in ranks for rank, trace in run.ranks.items() if trace.metadata.node in nodes)


def _surely_first(
    run: Run, broken: Collection[int], signs: Mapping[int, int | None], ended_cleanly: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks whose last signs of life came before all others by more than healthy ranks are ever silent."""
    known = {rank: sign for rank, sign in signs.items() if sign is not None}
    if not broken or len(known) < len(signs):
        return ()
    ascending = sorted(known, key=lambda rank: known[rank])
    # A rank that had nothing more to do and ended cleanly, long before, is no failure.
    ranks = list(itertools.dropwhile(lambda rank: rank in ended_cleanly, ascending))
    for number, (rank, later) in enumerate(itertools.pairwise(ranks), start=1):
        if rank not in broken:
            return ()
        if all(is_late(run.ranks[early], known[later] - known[early]) for early in ranks[:number]):
            return tuple(sorted(ranks[:number]))
    return ()
