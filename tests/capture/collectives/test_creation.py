"""Process groups are known as soon as they are made: hooks that are hung later miss what C++ sends first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from commtrace.capture.collectives import creation
from tests.capture.recording import Recording, fake_backend


@pytest.fixture
def watching(recording: Recording) -> Iterator[Recording]:
    """Torch's creation of groups is watched."""
    uninstall = creation.install(recording.tracer)
    try:
        yield recording
    finally:
        uninstall()


def told(recording: Recording) -> list[tuple[str, tuple[int, ...]]]:
    """Filled with the role and the ranks of every group when it becomes known."""
    found: list[tuple[str, tuple[int, ...]]] = []
    recording.tracer.groups.follow(lambda _group, state: found.append((state.group.role, state.ranks_by_group_rank)))
    return found


def test_the_default_group_is_known_when_it_has_been_made(watching: Recording) -> None:
    groups = told(watching)

    with fake_backend(rank=1, world_size=3):
        assert groups == [("world", (0, 1, 2))]
        assert watching.tracer.groups.place == (1, 3, "fake")


def test_the_default_group_is_known_each_time_that_it_is_made(watching: Recording) -> None:
    groups = told(watching)

    for world_size in (4, 2):
        with fake_backend(world_size=world_size):
            pass

    assert groups == [("world", (0, 1, 2, 3)), ("world", (0, 1))]


def test_a_group_of_some_ranks_is_known_when_it_has_been_made_with_its_own_ranks(watching: Recording) -> None:
    groups = told(watching)

    with fake_backend(rank=2):
        dist.new_group([0, 1])
        dist.new_group([3, 2])

        assert [ranks for _, ranks in groups] == [(0, 1, 2, 3), (2, 3)]


def test_groups_that_were_made_before_are_known_too(recording: Recording) -> None:
    with fake_backend(rank=2):
        dist.new_group([2, 3])
        uninstall = creation.install(recording.tracer)
        uninstall()

        assert [ranks for _, ranks in told(recording)] == [(0, 1, 2, 3), (2, 3)]


def test_torchs_own_functions_are_put_back(recording: Recording) -> None:
    from torch.distributed import distributed_c10d

    before = dict(vars(distributed_c10d))
    creation.install(recording.tracer)()

    assert vars(distributed_c10d) == before
