"""Every origin of communication, against torch.profiler's record of the same run.

The programs are in ``tests/e2e/programs/origins_*.py``; what is compared is in :mod:`tests.e2e.oracle`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e import oracle
from tests.e2e.launch import REPOSITORY, WAYS, fork
from tests.e2e.traces import rows

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not hasattr(dist, "all_gather_single"),
        reason="the programs call functions that this torch lacks; tests/matrix asks older versions",
    ),
]

PROGRAMS = REPOSITORY / "tests" / "e2e" / "programs"


def run_program(
    name: str,
    ranks: int,
    folder: Path,
    *sections: str,
    way: tuple[Path, ...] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    imports: Sequence[str] = (),
) -> Run:
    """The recorded run of a program, whose profiles lie in ``folder``."""
    environment = {"COMMTRACE_DIR": str(folder / "run"), "PYTHONPATH": str(REPOSITORY), **(env or {})}
    completed = fork([*way, PROGRAMS / name, *sections, folder], ranks, environment, timeout, imports)
    assert completed.returncode == 0, completed.stdout
    run = load_run(folder / "run")
    assert sorted(run.ranks) == list(range(ranks))
    return run


def assert_agrees(run: Run, folder: Path, group_size: Callable[[int], int] | int) -> None:
    """With the profiler, and among its ranks."""
    found = oracle.differences(run, folder, group_size)
    assert not found, "\n".join(found)
    oracle.assert_consistent(run)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("program", "sections"),
    [
        ("origins_python.py", ()),
        (
            "origins_functional.py",
            (
                "functions", "in_place", "point_to_point", "gradients", "operators", "redistribution",
                "tensor_parallel", "under_modes", "compiled_eager", "compiled_aot_eager",
            ),
        ),
        ("origins_sharded.py", ()),
        ("origins_applied.py", ()),
    ],
)  # fmt: skip
def test_every_communication_of_every_origin_is_recorded_once(
    program: str, sections: tuple[str, ...], way: tuple[Path, ...], tmp_path: Path
) -> None:
    run = run_program(program, 2, tmp_path, *sections, way=way)

    assert_agrees(run, tmp_path, 2)
    assert json.loads((tmp_path / "cannot-run-0.json").read_text()) == {}


def test_every_communication_is_recorded_once_where_torch_checks_the_calls_of_all_ranks(tmp_path: Path) -> None:
    """Under this variable torch wraps every process group in another one."""
    sections = ("vocabulary_and_loss_parallel", "state_dicts", "backward_in_other_threads", "nobody_waits")
    run = run_program("origins_applied.py", 2, tmp_path, *sections, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})

    assert_agrees(run, tmp_path, 2)


def test_every_communication_of_deepspeed_is_recorded_once(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'commtrace[deepspeed]'")

    run = run_program("origins_deepspeed.py", 2, tmp_path, imports=["deepspeed"])

    assert_agrees(run, tmp_path, 2)


@pytest.mark.parametrize("way", WAYS)
def test_every_communication_of_a_graph_compiled_by_inductor_is_recorded_once(
    way: tuple[Path, ...], tmp_path: Path
) -> None:
    inductor = ["torch._inductor.compile_fx"]

    run = run_program("origins_functional.py", 2, tmp_path, "compiled_inductor", way=way, imports=inductor)

    assert_agrees(run, tmp_path, 2)
    step = [row["step"] for row in rows(run, 0, schema.COLLECTIVE) if row["step"] >= 0]
    assert len(step) == 2 * 3, "two calls of a graph with three collectives"


def test_every_communication_on_meshes_is_recorded_once_with_its_dimension_as_role(tmp_path: Path) -> None:
    run = run_program("origins_mesh.py", 4, tmp_path)

    hybrid, pipelines = 1, 5
    assert_agrees(run, tmp_path, lambda section: 2 if section in (hybrid, pipelines) else 4)
    for rank, trace in run.ranks.items():
        first = rows(run, rank, schema.COLLECTIVE, step=0)
        roles = {row["bytes"] // 4: trace.groups[row["group"]].role for row in first}
        assert roles == {
            1: "replicate", 2: "shard", 3: "experts", 4: "pp", 5: "dp", 6: "tp", 7: "cp", 8: "fsdp", 9: "fsdp",
        }  # fmt: skip
