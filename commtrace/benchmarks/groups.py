"""Choose the groups of ranks that are measured, by a word of the user's.

>>> choose_groups("pairs", ["a", "a", "b", "b"])
(Round(groups=((0, 1, 2, 3),), word='pairs'),)
>>> choose_groups("across", ["a", "a", "b", "b"])
(Round(groups=((0, 2), (1, 3)), word='across'),)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from commtrace.errors import ConfigurationError

WORDS: Final = ("world", "node", "across", "pairs")


class Round(NamedTuple):
    """Groups without a common member, which are measured at the same time."""

    groups: tuple[tuple[int, ...], ...]
    word: str  # that means them


def choose_groups(word: str, nodes: Sequence[str]) -> tuple[Round, ...]:
    """Return the rounds that a word means; those of one rank are left out.

    Args:
        word: ``world``; ``node``: the ranks of each node; ``across``: the ranks at the same place of all nodes;
            ``pairs``: all ranks of two nodes, each two nodes once; or ranks such as ``0-3,8``.
        nodes: of each rank.

    Raises:
        ConfigurationError: the word is none of these, names a rank that the job has not, or leaves no group.
    """
    rounds = tuple(Round(groups, word) for groups in _groups(word, nodes) if groups)
    if not rounds:
        raise ConfigurationError(_too_small(word, nodes))
    return rounds


_SEVERAL_NODES: Final = (
    "at least two nodes",
    "start the command on each of them with torchrun --nnodes, or choose another group",
)
_NEEDS: Final = {
    "world": ("several ranks", "start more with torchrun --nproc-per-node"),
    "node": ("a node with several ranks", "start more on each with torchrun --nproc-per-node"),
    "across": _SEVERAL_NODES,
    "pairs": _SEVERAL_NODES,
}


def _too_small(word: str, nodes: Sequence[str]) -> str:
    if word not in _NEEDS:
        return f"--group {word}: name at least two ranks, such as 0-3,8"
    needed, advice = _NEEDS[word]
    there = f"{_count(len(nodes), 'rank')} on {_count(len(set(nodes)), 'node')}"
    return f"--group {word} needs {needed}, and the job has {there}: {advice}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _groups(word: str, nodes: Sequence[str]) -> Iterator[tuple[tuple[int, ...], ...]]:
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    if word == "world":
        yield _several([range(len(nodes))])
    elif word == "node":
        yield _several(by_node.values())
    elif word == "across":
        places = range(max(map(len, by_node.values())))
        yield _several(
            [[ranks[position] for ranks in by_node.values() if position < len(ranks)] for position in places]
        )
    elif word == "pairs":
        for pairs in tournament([*by_node]):
            yield _several([sorted([*by_node[first], *by_node[second]]) for first, second in pairs])
    else:
        yield _several([_ranks(word, len(nodes))])


def _several(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks) for ranks in groups if len(ranks) > 1)


def _ranks(word: str, world_size: int) -> list[int]:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", word, re.ASCII):
        raise ConfigurationError(f"--group {word}: write {', '.join(WORDS)}, or ranks such as 0-3,8")
    ranks: set[int] = set()
    for part in word.split(","):
        first, _, last = part.partition("-")
        if int(last or first) >= world_size:
            raise ConfigurationError(f"--group {word}: the job has ranks 0 to {world_size - 1}")
        ranks.update(range(int(first), int(last or first) + 1))
    return sorted(ranks)


def tournament(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield rounds of disjoint pairs, in which every two of the names meet once.

    All but the first move by one place around a table from round to round (the circle method).
    """
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        meeting = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(first, second) for first, second in meeting if first is not None and second is not None]
        seats[1:] = [seats[-1], *seats[1:-1]]
