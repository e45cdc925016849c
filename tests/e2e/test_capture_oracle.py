"""The oracle: torch.profiler's own record of the same run lists every communication that was issued, whoever issued it.

What commtrace recorded must be the same, each operation once, on every rank; and what the ranks recorded must fit
together.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commtrace.trace import schema
from commtrace.trace.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, launch
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "every_origin.py"
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}

Shapes = list[Any]


def elements(position: int) -> Callable[[Shapes, int], int]:
    """Number of elements of the tensor, or the tensors, in one argument of the profiler's operator."""
    return lambda shapes, _size: sum(math.prod(shape) for shape in tensors(shapes[position]))


def elements_of_each_rank(position: int) -> Callable[[Shapes, int], int]:
    """For an argument that is one rank's part of a list whose other parts are as large."""
    return lambda shapes, size: size * elements(position)(shapes, size)


def tensors(argument: Any) -> list[list[int]]:
    return argument if argument and isinstance(argument[0], list) else [argument]


def nothing(_shapes: Shapes, _size: int) -> int:
    return 0


OPERATORS: dict[str, tuple[str, Callable[[Shapes, int], int]]] = {
    "allreduce_": ("all_reduce", elements(0)),
    "allreduce_coalesced_": ("all_reduce", elements(0)),
    "broadcast_": ("broadcast", elements(0)),
    "reduce_": ("reduce", elements(0)),
    "allgather_": ("all_gather", elements_of_each_rank(1)),
    "_allgather_base_": ("all_gather", elements(0)),
    "allgather_into_tensor_coalesced_": ("all_gather", elements(0)),
    "reduce_scatter_": ("reduce_scatter", elements_of_each_rank(0)),
    "_reduce_scatter_base_": ("reduce_scatter", elements(1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", elements(1)),
    "gather_": ("gather", elements(1)),
    "scatter_": ("scatter", elements(0)),
    "alltoall_": ("all_to_all", elements(1)),
    "alltoall_base_": ("all_to_all", elements(1)),
    "send": ("send", elements(0)),
    "recv_": ("recv", elements(0)),
    "barrier": ("barrier", nothing),
    "monitored_barrier_": ("barrier", nothing),
}


@pytest.mark.parametrize("size", [2, 4])
def test_every_communication_is_recorded_once_with_its_size(size: int, tmp_path: Path) -> None:
    completed = launch([PROGRAM, tmp_path], size, {"COMMTRACE_DIR": str(tmp_path / "run")}, timeout=150)

    assert completed.returncode == 0, completed.stdout
    run = load_run(tmp_path / "run")
    assert run.problems == ()
    assert sorted(run.ranks) == list(range(size))
    for rank in range(size):
        assert recorded(run, rank) == profiled(tmp_path / f"profiler-{rank}.json", size)
        assert run.ranks[rank].closed
        assert run.ranks[rank].dropped == {}
    assert_stalls_belong_to_communications(run)
    assert_collectives_match(run)
    assert_point_to_point_operations_match(run)


def recorded(run: Run, rank: int) -> Counter[tuple[str, int]]:
    return Counter(
        (row["name"], number_of_elements(run, row)) for row in rows(run, rank, schema.COLLECTIVE, schema.P2P)
    )


def number_of_elements(run: Run, row: dict[str, Any]) -> int:
    return row["bytes"] // BYTES_PER_ELEMENT[run.names[row["dtype"]]] if row["dtype"] >= 0 else 0


def profiled(path: Path, size: int) -> Counter[tuple[str, int]]:
    counts: Counter[tuple[str, int]] = Counter()
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::"):
            operation, count = OPERATORS[event["name"].removeprefix("c10d::")]
            counts[operation, count(event["args"]["Input Dims"], size)] += 1
    return counts


def assert_stalls_belong_to_communications(run: Run) -> None:
    """Everything in the program was waited for, once."""
    for rank in run.ranks:
        ids = sorted(row["id"] for row in rows(run, rank, schema.COLLECTIVE, schema.P2P))
        assert sorted(row["stalled_on"] for row in rows(run, rank, schema.STALL)) == ids
        assert len(set(ids)) == len(ids)


def assert_collectives_match(run: Run) -> None:
    """(group, seq) names the same operation, of the same size, on every member, and numbers have no gaps."""
    sides: dict[tuple[int, int], dict[int, tuple[str, int]]] = defaultdict(dict)
    for rank, row in all_rows(run, schema.COLLECTIVE):
        key = row["group"], row["seq"]
        assert rank not in sides[key], f"rank {rank} recorded {key} twice"
        uneven = row["self_bytes"] >= 0
        sides[key][rank] = row["name"], -1 if uneven else row["bytes"]
    groups = {group.id: group for trace in run.ranks.values() for group in trace.groups.values()}
    for (group, _seq), described in sides.items():
        assert sorted(described) == list(groups[group].ranks)
        names, sizes = zip(*described.values(), strict=True)
        assert len(set(names)) == 1
        assert len(set(sizes)) == 1
    for group in groups:
        numbers = sorted(seq for other, seq in sides if other == group)
        assert numbers == list(range(len(numbers)))


def assert_point_to_point_operations_match(run: Run) -> None:
    """The n-th send from a to b in a group is as large as the n-th receive from a on b."""
    sends, receives = {}, {}
    for rank, row in all_rows(run, schema.P2P):
        if row["name"] == "send":
            sends[row["group"], rank, row["peer"], row["seq"]] = row["bytes"]
        else:
            receives[row["group"], row["peer"], rank, row["seq"]] = row["bytes"]
    assert sends
    assert sends == receives


def all_rows(run: Run, kind: int) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((rank, row) for rank in run.ranks for row in rows(run, rank, kind))
