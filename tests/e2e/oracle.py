"""The oracle: torch.profiler's own record of the same run lists every communication that was issued, whoever issued it.

``differences`` says, rank by rank and section by section, where what commtrace recorded is not what the profiler saw:
operation, number of elements, dtype where the profiler knows it. Nothing of commtrace's capture is used for the
profiler's side.

A program's sections are steps of the recorded run and ``record_function`` ranges of the profile
(:mod:`tests.e2e.programs.watched`); what lies outside of them is section −1.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from commtrace.trace import schema
from commtrace.trace.run import Run
from tests.e2e.traces import rows

_BYTES_PER_ELEMENT = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
_PROFILERS_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "long int": "int64",
    "int": "int32", "short int": "int16", "signed char": "int8", "unsigned char": "uint8", "bool": "bool",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip

Shapes = list[Any]


class Communication(NamedTuple):
    """What both sides can tell of one communication.

    Attributes:
        operation: as in the rows' name.
        elements: of the payload as docs/definitions.md counts it.
        dtype: empty where the profiler does not tell it (lists of tensors).
    """

    operation: str
    elements: int
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.operation}[{self.elements}{' ' + self.dtype if self.dtype else ''}]"


Sections = dict[int, Counter[Communication]]


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


OPERATORS: dict[str, tuple[str, int, Callable[[Shapes, int], int]]] = {
    "allreduce_": ("all_reduce", 0, elements(0)),
    "allreduce_coalesced_": ("all_reduce", 0, elements(0)),
    "broadcast_": ("broadcast", 0, elements(0)),
    "reduce_": ("reduce", 0, elements(0)),
    "allgather_": ("all_gather", 1, elements_of_each_rank(1)),
    "allgather_coalesced_": ("all_gather", 1, elements_of_each_rank(1)),
    "_allgather_base_": ("all_gather", 0, elements(0)),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, elements(0)),
    "reduce_scatter_": ("reduce_scatter", 0, elements_of_each_rank(0)),
    "_reduce_scatter_base_": ("reduce_scatter", 1, elements(1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, elements(1)),
    "gather_": ("gather", 1, elements(1)),
    "scatter_": ("scatter", 0, elements(0)),
    "alltoall_": ("all_to_all", 1, elements(1)),
    "alltoall_base_": ("all_to_all", 1, elements(1)),
    "send": ("send", 0, elements(0)),
    "recv_": ("recv", 0, elements(0)),
    "recv_any_source_": ("recv", 0, elements(0)),
    "barrier": ("barrier", 0, nothing),
    "monitored_barrier_": ("barrier", 0, nothing),
}
"""c10d operator → name of the operation, argument that is the payload, its number of elements given the shapes of the
arguments and the size of the group."""

_NO_PAYLOAD = {"barrier", "monitored_barrier_"}
_NOT_COMMUNICATION = {"check_for_nan"}


def profiled(path: Path, group_size: Callable[[int], int] | int) -> Sections:
    """By section, what the profiler saw. ``group_size``: of every group, or of the groups that a section uses."""
    events = json.loads(path.read_text())["traceEvents"]
    ranges = section_ranges(events)
    found: Sections = defaultdict(Counter)
    for event in issued(events):
        name = event["name"].removeprefix("c10d::")
        if name in _NOT_COMMUNICATION:
            continue
        section = next((number for number, _, start, end in ranges if start <= event["ts"] < end), -1)
        size = group_size if isinstance(group_size, int) else group_size(section)
        operation, payload, count = OPERATORS[name]
        types = event["args"].get("Input type", [])
        told = types[payload] if payload < len(types) and name not in _NO_PAYLOAD else ""
        number = count(event["args"]["Input Dims"], size)
        found[section][Communication(operation, number, _PROFILERS_DTYPES.get(told, ""))] += 1
    return found


def issued(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The operators' events. Under a mode that hands operators on, each has one inside it that is the same call."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::")]
    outer: dict[int, dict[str, Any]] = {}
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        around = outer.get(event["tid"])
        if (
            around is not None
            and around["name"] == event["name"]
            and event["ts"] + event["dur"] <= around["ts"] + around["dur"]
        ):
            continue
        outer[event["tid"]] = event
        yield event


def section_ranges(events: list[dict[str, Any]]) -> list[tuple[int, str, float, float]]:
    """``(number, name, start, end)`` of every section."""
    found = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("section:"):
            _, number, name = event["name"].split(":")
            found[int(number)] = (int(number), name, event["ts"], event["ts"] + event["dur"])
    return [found[number] for number in sorted(found)]


def section_names(path: Path) -> dict[int, str]:
    return {number: name for number, name, _, _ in section_ranges(json.loads(path.read_text())["traceEvents"])}


def recorded(run: Run, rank: int) -> Sections:
    """By section, what commtrace recorded."""
    found: Sections = defaultdict(Counter)
    for row in rows(run, rank, schema.COLLECTIVE, schema.P2P):
        dtype = run.names[row["dtype"]] if row["dtype"] >= 0 else ""
        count = row["bytes"] // _BYTES_PER_ELEMENT[dtype] if dtype else 0
        found[row["step"]][Communication(row["name"], count, dtype)] += 1
    return found


def differences(run: Run, folder: Path, size: Callable[[int], int] | int) -> list[str]:
    """One line for each communication that only one of the two saw, or saw otherwise; empty if they agree."""
    lines = []
    for rank in sorted(run.ranks):
        path = folder / f"profiler-{rank}.json"
        names, seen, ours = section_names(path), profiled(path, size), recorded(run, rank)
        for number in sorted({*seen, *ours}):
            missing, extra = unmatched(seen[number], ours[number])
            where = f"rank {rank}, {names.get(number, 'outside of sections')}"
            lines += [f"{where}: {count} × {each} not recorded" for each, count in sorted(missing.items())]
            lines += [f"{where}: {count} × {each} recorded, not issued" for each, count in sorted(extra.items())]
    return lines


def unmatched(
    seen: Counter[Communication], ours: Counter[Communication]
) -> tuple[Counter[Communication], Counter[Communication]]:
    """What is left on either side. The profiler's lists of tensors have no dtype: they match any."""
    missing, extra = seen - ours, ours - seen
    for each in [each for each in missing if not each.dtype]:
        for other in [other for other in extra if other[:2] == each[:2]]:
            paired = min(missing[each], extra[other])
            missing[each] -= paired
            extra[other] -= paired
    return +missing, +extra


def assert_consistent(run: Run) -> None:
    """What the ranks recorded fits together: every rank whole, every number on every member, sizes equal."""
    assert run.problems == ()
    for trace in run.ranks.values():
        assert trace.closed
        assert trace.dropped == {}
    assert_collectives_match(run)
    assert_point_to_point_operations_match(run)


def assert_collectives_match(run: Run) -> None:
    """(group, seq) names the same operation, of the same size, on every member, and numbers have no gaps."""
    sides: dict[tuple[int, int], dict[int, tuple[str, int]]] = defaultdict(dict)
    for rank, row in all_rows(run, schema.COLLECTIVE):
        key = row["group"], row["seq"]
        assert rank not in sides[key], f"rank {rank} recorded {key} twice"
        uneven = row["self_bytes"] >= 0
        sides[key][rank] = row["name"], -1 if uneven else row["bytes"]
    groups = {group.id: group for trace in run.ranks.values() for group in trace.groups.values()}
    for (group, seq), described in sides.items():
        where = f"{groups[group]}, number {seq}: {described}"
        assert sorted(described) == list(groups[group].ranks), where
        names, sizes = zip(*described.values(), strict=True)
        assert len(set(names)) == 1, where
        assert len({size for size in sizes if size >= 0}) <= 1, where
    for group in groups:
        numbers = sorted(seq for other, seq in sides if other == group)
        assert numbers == list(range(len(numbers))), groups[group]


def assert_point_to_point_operations_match(run: Run) -> None:
    """The n-th send from a to b in a group is as large as the n-th receive from a on b."""
    sends, receives = {}, {}
    for rank, row in all_rows(run, schema.P2P):
        if row["name"] == "send":
            sends[row["group"], rank, row["peer"], row["seq"]] = row["bytes"]
        else:
            receives[row["group"], row["peer"], rank, row["seq"]] = row["bytes"]
    assert sends == receives


def all_rows(run: Run, kind: int) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((rank, row) for rank in run.ranks for row in rows(run, rank, kind))
