"""The table of what was measured on a GPU, to be pasted into docs/gpu-validation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

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
    "aborted group",
)
"""In the order of the table."""

HOLDS, FAILS = "holds", "FAILS"


class Row(NamedTuple):
    """An answer.

    Attributes:
        question: one of ``QUESTIONS``.
        backend: of NCCL; empty where it does not matter.
        verdict: ``HOLDS``, ``FAILS``, or why it was not run.
        figures: what was measured.
    """

    question: str
    backend: str
    verdict: str
    figures: str = ""


def markdown(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    """Return the table, and the machine above it. A question that nobody has answered has a row as well."""
    answered = {row.question for row in rows}
    missing = [Row(question, "", "not run: no test came to it") for question in QUESTIONS if question not in answered]
    ordered = sorted([*rows, *missing], key=lambda row: (QUESTIONS.index(row.question), row.backend))
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ":",
        "",
        "| question | backend | verdict | figures |",
        "|---|---|---|---|",
        *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in ordered),
    ]
    return "\n".join(lines)


def microseconds(values_ns: Sequence[float]) -> str:
    """Return the median and the largest absolute value."""
    if len(values_ns) == 0:
        return "none"
    ordered = sorted(abs(value) / 1000 for value in values_ns)
    return f"median {ordered[len(ordered) // 2]:.1f} µs, largest {ordered[-1]:.1f} µs"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
