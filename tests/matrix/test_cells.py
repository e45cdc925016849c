"""What the matrix asks of every version is asked of the installed ones here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import fork
from tests.matrix.cell import try_kind

pytestmark = pytest.mark.e2e

MODULES = {"megatron": "megatron.core", "deepspeed": "deepspeed"}


# Every kind on the newest versions (`make test-newest`); on others the oracle of tests/e2e has asked the same of more.
OTHERS = [
    pytest.param(kind, marks=pytest.mark.long) for kind in ("python", "fsdp", "pipelining", "megatron", "deepspeed")
]


@pytest.mark.parametrize("kind", ["ddp", *OTHERS])
def test_steps_and_communications_agree_with_the_script_and_the_profiler(kind: str, tmp_path: Path) -> None:
    if kind in MODULES:
        pytest.importorskip(MODULES[kind], reason=f"{MODULES[kind]} is not installed: pip install 'commtrace[{kind}]'")

    cell = try_kind(kind, tmp_path, fork)

    assert cell.is_right, cell.outcome
    assert "6 of 6 steps" in cell.outcome
