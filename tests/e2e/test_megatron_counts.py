"""Every communication of a real Megatron iteration is recorded once, with its role and its bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork_with_megatron
from tests.e2e.traces import compared_with_plan, role_of, rows
from tests.reference import reference_data

pytestmark = pytest.mark.e2e
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "megatron_counts.py"

LAYOUTS = {
    2: {"tp2": "--tp 2", "tp2_sp": "--tp 2 --sp"},
    4: {"pp4": "--pp 4 --mb 8", "tp2_pp2_sp": "--tp 2 --pp 2 --sp"},
}
"""By number of ranks, the layouts that one job goes through."""

OPERATIONS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "isend": "send",
    "irecv": "recv",
}
ROLES = {"EMB": "embedding"}


@pytest.mark.parametrize("processes", LAYOUTS)
def test_counts_are_those_of_megatron_itself(processes: int, tmp_path: Path) -> None:
    reference_data("megatron_counts")  # before the job
    layouts = LAYOUTS[processes]

    runs = [f"{layout}:{options}" for layout, options in layouts.items()]
    completed = fork_with_megatron([PROGRAM, tmp_path, *runs], processes, timeout=240)

    assert completed.returncode == 0, completed.stdout
    for layout in layouts:
        run = load_run(tmp_path / layout)
        assert run.problems == ()
        comparison = compared_with_plan(tmp_path / layout)
        assert {row.verdict for row in comparison.rows} == {"same"}, [row for row in comparison.rows if row.reason]
        for rank in range(processes):
            recorded = Counter(
                (row["name"], role_of(run.ranks[rank], row["group"], row["peer"]), row["bytes"])
                for row in rows(run, rank, schema.COLLECTIVE, schema.P2P, step=0)
            )
            assert recorded == reference(layout, rank), layout


def reference(layout: str, rank: int) -> Counter[tuple[str, str, int]]:
    recorded = json.loads(reference_data("megatron_counts", layout, f"r{rank}.json").read_text())["rec"]
    return Counter(
        {
            (OPERATIONS.get(operation, operation), ROLES.get(role, role.lower()), num_bytes): calls
            for operation, role, num_bytes, calls in recorded
        }
    )
