"""The table of what was measured on a GPU, to be pasted into docs/gpu-validation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy.typing as npt

QUESTIONS: Final = (
    "spans against kernels",
    "barriers",
    "training: spans against kernels",
    "Megatron-core: results",
    "hidden ends: upper bounds",
    "hidden ends: flight recorder",
    "overhead of a step",
    "synchronisations",
    "memory",
    "recorded peak",
    "dropped spans",
    "graph capture",
    "replays of graphs",
    "aborted group",
)
"""In the order of the table."""

HOLDS, FAILS, MEASURED = "holds", "FAILS", "measured"


class Row(NamedTuple):
    """An answer.

    Attributes:
        question: one of the table's.
        variant: a backend of NCCL or an engine of commtrace; empty where it does not matter.
        verdict: ``HOLDS``, ``FAILS``, ``MEASURED`` where no limit is set, or why it was not run.
        figures: what was measured.
    """

    question: str
    variant: str
    verdict: str
    figures: str = ""


def markdown(
    rows: Sequence[Row],
    machine: Mapping[str, str],
    questions: Sequence[str] = QUESTIONS,
    *,
    variant: str = "backend",
    why_missing: str = "no test came to it",
) -> str:
    """Return the table, and the machine above it. A question that nobody has answered has a row as well.

    Args:
        questions: in the order of the table.
        variant: the heading of the rows' variants.
    """
    answered = {row.question for row in rows}
    missing = [Row(question, "", f"not run: {why_missing}") for question in questions if question not in answered]
    ordered = sorted([*rows, *missing], key=lambda row: (questions.index(row.question), row.variant))
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ":",
        "",
        f"| question | {variant} | verdict | figures |",
        "|---|---|---|---|",
        *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in ordered),
    ]
    return "\n".join(lines)


def microseconds(values_ns: Sequence[float] | npt.NDArray[Any]) -> str:
    """Return the median and the largest absolute value."""
    if len(values_ns) == 0:
        return "none"
    ordered = sorted(abs(value) / 1000 for value in values_ns)
    return f"median {ordered[len(ordered) // 2]:.1f} µs, largest {ordered[-1]:.1f} µs"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
