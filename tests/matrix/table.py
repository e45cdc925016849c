"""Makes the table of docs/support.md from the lines that noxfile.py has written.

    python -m tests.matrix.table matrix.jsonl

A cell that was tried several times has its last outcome; a cell that nobody tried says so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PLAIN = ("python", "ddp", "fsdp", "pipelining")
HEADER = ("torch", "Python", "torch.distributed", "DDP", "FSDP2", "1F1B")
FRAMEWORKS = {
    "megatron": ("megatron-core",),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
}
NOT_RUN = "not run"

Outcome = dict[str, Any]


def tables(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of both tables: what torch itself brings, and the frameworks."""
    outcomes: list[Outcome] = [json.loads(line) for line in lines]
    plain: dict[tuple[str, str], dict[str, str]] = {}
    frameworks: dict[tuple[str, str, str], str] = {}
    for outcome in outcomes:
        torch, python = outcome["torch"].partition("+")[0], ".".join(outcome["python"].split(".")[:2])
        kind, words = outcome["kind"], outcome["outcome"]
        if kind in PLAIN:
            plain.setdefault((torch, python), {})[kind] = words
        else:
            names = ", ".join(f"{name} {outcome[name]}" for name in FRAMEWORKS[kind])
            frameworks[names, torch, python] = words
    yield from _table(HEADER, ((*key, *(cells.get(kind, NOT_RUN) for kind in PLAIN)) for key, cells in plain.items()))
    yield ""
    header = ("framework", "torch", "Python", "training")
    yield from _table(header, ((*key, words) for key, words in frameworks.items()))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    def by_version(row: tuple[str, ...]) -> list[str]:
        return [part.zfill(4) for cell in row[:2] for part in re.split(r"[ .]", cell)]

    yield _line(header)
    yield "|" + "---|" * len(header)
    yield from map(_line, sorted(rows, key=by_version))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(tables(Path(sys.argv[1]).read_text().splitlines())))
