from __future__ import annotations

from commtrace.analysis.matching.blame import blame_ns
from commtrace.analysis.matching.match import match
from tests.factory import collective, group, make_run


def test_the_last_one_is_to_blame_for_all_who_waited() -> None:
    """0 waits 30 and 1 waits 10 for rank 2; then 1 and 2 wait 5 each for rank 0."""
    world = group("world", 0, 1, 2)
    first = {0: 0, 1: 20, 2: 30}
    second = {0: 105, 1: 100, 2: 100}
    run = make_run(
        {
            rank: [
                collective("all_reduce", world, 0, first[rank], 50),
                collective("all_reduce", world, 1, second[rank], 120),
            ]
            for rank in range(3)
        },
        [world],
    )

    assert blame_ns(run, match(run)) == {2: 40, 0: 10}


def test_nobody_is_to_blame_for_what_was_not_seen() -> None:
    world = group("world", 0, 1)
    run = make_run({0: [collective("all_reduce", world, 0, 0, 50)]}, [world], world_size=2)

    assert blame_ns(run, match(run)) == {}
