"""The table says what was tried, and of the rest that it was not."""

from __future__ import annotations

import json
from typing import Any

from tests.matrix.table import tables


def line(torch: str, python: str, kind: str, outcome: str, **frameworks: Any) -> str:
    return json.dumps({"torch": torch, "python": python, "kind": kind, "outcome": outcome, **frameworks})


def test_the_last_outcome_counts_and_what_was_not_tried_is_not_filled() -> None:
    lines = [
        line("2.15.0", "3.12.1", "ddp", "right"),
        line("2.4.1+cu121", "3.10.13", "python", "wrong"),
        line("2.4.1+cu121", "3.10.13", "python", "right"),
        line("2.4.1", "3.10.13", "megatron", "right", **{"megatron-core": "0.12.3"}),
    ]

    assert list(tables(lines)) == [
        "| torch | Python | torch.distributed | DDP | FSDP2 | 1F1B |",
        "|---|---|---|---|---|---|",
        "| 2.4.1 | 3.10 | right | not run | not run | not run |",
        "| 2.15.0 | 3.12 | not run | right | not run | not run |",
        "",
        "| framework | torch | Python | training |",
        "|---|---|---|---|",
        "| megatron-core 0.12.3 | 2.4.1 | 3.10 | right |",
    ]
