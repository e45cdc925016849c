"""Look into the files of other worlds for members of a group that joins worlds: had they arrived, where are they?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from commtrace.analysis.hangs.rank_state import Ending, LastActivity, find_endings, last_activity
from commtrace.analysis.hangs.stops import Elsewhere, Stop
from commtrace.analysis.matching.arrivals import MessageDirection, RankArrivals, find_arrivals, known_groups
from commtrace.errors import CommtraceError
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.files.jobs import other_worlds
from commtrace.trace.files.reader import load_newest
from commtrace.trace.metadata import Group, GroupMember
from commtrace.trace.processes import AskProcess
from commtrace.trace.run import Run


class _World(NamedTuple):
    """Another world of the job, as of the newest files of its ranks."""

    run: Run
    groups: Mapping[int, Group]
    arrivals: Mapping[int, RankArrivals]
    endings: Mapping[int, Ending]

    def activity(self, rank: int) -> LastActivity | None:
        trace = self.run.ranks.get(rank)
        return None if trace is None else last_activity(self.run, trace, self.arrivals[rank], self.groups)


def with_other_worlds(run: Run, stops: Sequence[Stop], now_ns: int, ask: AskProcess) -> list[Stop]:
    """Return the stops with the members of other worlds; their files are read where a group with them has stopped."""
    groups = known_groups(run)
    concerned = [group for stop in stops if (group := groups.get(stop.group_id)) is not None and group.is_over_worlds]
    if not concerned:
        return list(stops)
    worlds = _other_worlds(run, concerned, now_ns, ask)
    return [
        replace(stop, elsewhere=_elsewhere(run, groups[stop.group_id], stop, worlds))
        if groups.get(stop.group_id) in concerned
        else stop
        for stop in stops
    ]


def _other_worlds(run: Run, groups: Sequence[Group], now_ns: int, ask: AskProcess) -> dict[str, _World]:
    found: dict[str, _World] = {}
    for world in other_worlds(run.path, groups) if run.path.is_dir() else ():
        try:
            loaded = load_newest(world.path)
        except (CommtraceError, OSError):  # of what is not readable nothing is known: `doctor` on it says why
            continue
        found[world.metadata.world] = _World(
            loaded, known_groups(loaded), find_arrivals(loaded), find_endings(loaded, now_ns, ask, None)
        )
    return found


def _elsewhere(run: Run, group: Group, stop: Stop, worlds: Mapping[str, _World]) -> tuple[Elsewhere, ...]:
    """Return the members of other worlds that a stop concerns: all, or the other side of a message."""
    own = run.any_metadata.world
    numbers: Sequence[int] = range(len(group.members))
    if stop.message is not None:
        numbers = [side - OUTSIDE for side in stop.message[:2] if side >= OUTSIDE]
    found = []
    for number in numbers:
        member = group.members[number] if number < len(group.members) else None
        if member is None:
            found.append(Elsewhere(number))
        elif member.world != own or not own:
            found.append(_of_member(number, member, group, stop, worlds.get(member.world)))
    return tuple(found)


def _of_member(number: int, member: GroupMember, group: Group, stop: Stop, world: _World | None) -> Elsewhere:
    known = Elsewhere(number, member.rank, member.run_id, member.host, member.pid)
    if world is None or member.rank not in world.run.ranks:
        return known
    same = next((one.id for one in world.groups.values() if group.key and one.key == group.key), None)
    return known._replace(
        launched=None if same is None else _launched(world.arrivals[member.rank], same, group, stop),
        state=world.endings[member.rank].state,
        activity=world.activity(member.rank),
    )


def _launched(arrivals: RankArrivals, group_id: int, group: Group, stop: Stop) -> int:
    """Return how many communications a member has begun of those that a stop counts; ``group_id`` is its world's."""
    if stop.message is None:
        return arrivals.arrived.get(group_id, 0)
    is_send = stop.message.sender >= OUTSIDE
    partners = [number for number, member in enumerate(group.members) if member and member.rank == stop.arrived[0]]
    messages = [MessageDirection(group_id, is_send, OUTSIDE + number, stop.message.tag) for number in partners]
    return max((arrivals.messages.get(message, 0) for message in messages), default=0)
