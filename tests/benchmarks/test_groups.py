from __future__ import annotations

from itertools import combinations

import pytest

from commtrace.benchmarks.groups import choose_groups, tournament
from commtrace.errors import ConfigurationError

TWO_NODES = ["a", "a", "b", "b"]
THREE_NODES = ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize(
    ("word", "nodes", "expected"),
    [
        ("world", TWO_NODES, [[(0, 1, 2, 3)]]),
        ("node", TWO_NODES, [[(0, 1), (2, 3)]]),
        ("node", ["a", "b", "b"], [[(1, 2)]]),
        ("across", TWO_NODES, [[(0, 2), (1, 3)]]),
        ("across", ["a", "a", "b"], [[(0, 2)]]),
        ("pairs", TWO_NODES, [[(0, 1, 2, 3)]]),
        ("pairs", THREE_NODES, [[(1, 2, 4, 5)], [(0, 2, 3, 5)], [(0, 1, 3, 4)]]),
        ("0-1,3", TWO_NODES, [[(0, 1, 3)]]),
    ],
)
def test_groups_by_a_word(word: str, nodes: list[str], expected: list[list[tuple[int, ...]]]) -> None:
    assert [list(each.groups) for each in choose_groups(word, nodes)] == expected


@pytest.mark.parametrize("count", [2, 3, 4, 7, 32])
def test_every_two_meet_once_and_nobody_is_in_two_places(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    rounds = list(tournament(names))

    assert sorted(tuple(sorted(pair)) for each in rounds for pair in each) == sorted(
        tuple(sorted(pair)) for pair in combinations(names, 2)
    )
    assert all(len(set().union(*each)) == 2 * len(each) for each in rounds)
    assert len(rounds) == count - 1 + count % 2


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rails", "write world, node, across, pairs, or ranks such as 0-3,8"),
        ("0-4", "the job has ranks 0 to 3"),
        ("3", "name at least two ranks"),
    ],
)
def test_groups_that_cannot_be(word: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        choose_groups(word, TWO_NODES)


@pytest.mark.parametrize(
    ("word", "nodes", "said"),
    [
        ("pairs", ["a"] * 4, "--group pairs needs at least two nodes, and the job has 4 ranks on 1 node: start"),
        ("across", ["a"], "--group across needs at least two nodes, and the job has 1 rank on 1 node: start"),
        ("node", ["a", "b"], "--group node needs a node with several ranks, and the job has 2 ranks on 2 nodes: start"),
        ("world", ["a"], "--group world needs several ranks, and the job has 1 rank on 1 node: start"),
    ],
)
def test_a_job_too_small_for_its_groups(word: str, nodes: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        choose_groups(word, nodes)
