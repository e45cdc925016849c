"""Let the members of a group over several worlds present themselves to each other, through the group's own store.

Beside training, on threads of our own, with requests that wait for no other member. The first error ends it for its
group: its members, or those that were not heard of, stay unknown.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from commtrace.capture.collectives.groups import GroupRegistry, GroupState, store_of, without_prefixes
from commtrace.recording.identity import StoreRequest
from commtrace.trace.metadata import GroupMember, is_world_key, new_world_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PART: Final = "the members of groups over several worlds"

_PREFIX: Final = "commtrace/members"
_MOST_BYTES: Final = 2_000
_ANSWER_SECONDS: Final = 0.1
_OFTEN_SECONDS: Final = 60.0
"""From the start: for so long there is a request in each pass of the harvester."""
_SELDOM_SECONDS: Final = 10.0
"""Interval of requests after that."""
_LONGEST_SECONDS: Final = 1800.0
"""A member that has not presented itself by then is not recorded."""

_logger = logging.getLogger("commtrace")


class GroupMeetings:
    """The part of one rank, ``member``, in all its groups. For the harvester's thread."""

    def __init__(self, groups: GroupRegistry, member: GroupMember, now: Callable[[], float] = time.monotonic) -> None:
        self._groups, self._member, self._now = groups, member, now
        self._meetings: list[_Meeting] = []
        self._num_seen = 0

    def step(self) -> None:
        """Go on in each group; what has become known is in the registry."""
        over_worlds = self._groups.over_worlds
        for reference, state in over_worlds[self._num_seen :]:
            self._meetings.append(_Meeting(reference, state, self._member, self._now))
        self._num_seen = len(over_worlds)
        for meeting in tuple(self._meetings):
            if meeting.step():
                self._groups.set_members(meeting.state, meeting.members, meeting.key)
            if meeting.is_over:
                self._meetings.remove(meeting)


class _Meeting:
    """The members of one group, by their rank in it, as far as they have presented themselves."""

    def __init__(
        self, group: weakref.ref[ProcessGroup], state: GroupState, member: GroupMember, now: Callable[[], float]
    ) -> None:
        self.state = state
        self.members: tuple[GroupMember | None, ...] = state.group.members
        self.key = ""
        self.is_over = False
        self._group, self._member, self._now = group, member, now
        self._began = self._due = now()
        self._own_number = self._number_of(group())
        self._has_told = False
        self._request: StoreRequest | None = None
        # A connection of our own, as that of the job may be in use for long. The job's store is never kept: what it
        # holds, as a port, must be free once the job is done with it.
        self._connection: Any = None

    def step(self) -> bool:
        """Ask, and take what is there; return whether more is known."""
        now = self._now()
        if self._own_number >= 0 and self.members[self._own_number] is None:
            self.members = (*self.members[: self._own_number], self._member, *self.members[self._own_number + 1 :])
            return True
        patience = 0.0
        if self._request is None:
            if now < self._due:
                return False
            self._request, patience = StoreRequest(self._ask), _ANSWER_SECONDS
        if not self._request.has_ended(patience):
            return False
        request, self._request = self._request, None
        self._due = now if now < self._began + _OFTEN_SECONDS else now + _SELDOM_SECONDS
        try:
            answers: dict[int, tuple[GroupMember, str]] = request.answer()
        except Exception as error:  # whatever a store may raise: nothing depends on it
            _logger.debug("commtrace: the members of %s are not known: %s", self.state.group.name, error)
            self.is_over = True
            return False
        members = list(self.members)
        for number, (member, key) in answers.items():
            members[number] = member
            self.key = key if number == 0 else self.key
        self.members = tuple(members)
        self.is_over = self.is_over or None not in members or now > self._began + _LONGEST_SECONDS
        return bool(answers)

    def _ask(self) -> dict[int, tuple[GroupMember, str]]:
        store = self._connected()
        if store is None:
            self.is_over = True
            return {}
        answers = {}
        if self._own_number >= 0 and not self._has_told:
            text = json.dumps([*structs.astuple(self._member), new_world_key()])
            store.set(self._store_key(self._own_number), text)
            self._has_told = True
            answers[self._own_number] = _parsed(text.encode())
        for number, member in enumerate(self.members):
            if member is None and number not in answers and store.check([self._store_key(number)]):
                answers[number] = _parsed(store.get(self._store_key(number)))
        return answers

    def _connected(self) -> Any:
        """Return a connection to the group's store; None if torch does not know the store, or the group is gone."""
        if self._connection is not None:
            return self._connection
        store: Any = store_of(self._group())
        is_of_network = getattr(without_prefixes(store), "port", None) is not None
        if not is_of_network or not hasattr(store, "clone"):
            return store
        self._connection = store.clone()
        return self._connection

    def _number_of(self, group: ProcessGroup | None) -> int:
        """Return the rank of this process in the group; −1 if that is not known, or the group is gone."""
        try:
            number = -1 if group is None else group.rank()
        except Exception as error:  # a group that is written in Python may raise anything
            _logger.debug("commtrace: a group does not tell the rank in it: %s", error)
            return -1
        return number if 0 <= number < len(self.members) else -1

    def _store_key(self, number: int) -> str:
        # A store may outlive a group, and serve the next one of its name.
        return f"{_PREFIX}/{self.state.group.ordinal}/{number}"


def _parsed(value: bytes) -> tuple[GroupMember, str]:
    """Return a member and the key that it would give the group; raise ValueError for what none has written."""
    fields: Sequence[object] = json.loads(value[:_MOST_BYTES])
    if not isinstance(fields, list) or [type(field) for field in fields] != [str, str, int, str, int, str]:
        raise ValueError(f"its store holds {value[:20]!r} for a member")
    *about, key = fields
    member = GroupMember(*about)
    if not is_world_key(key) or not (is_world_key(member.world) or not member.world) or member.rank < 0:
        raise ValueError(f"its store holds {value[:20]!r} for a member")
    return member, key
