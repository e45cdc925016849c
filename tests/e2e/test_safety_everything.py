"""Training computes the same bits while everything is on that commtrace can do: not only spans, but also modules, live
metrics, samples, requests by signal, the watch for hangs.

Each framework is launched once without commtrace and once with all of it; Megatron is in test_megatron_training.py. The
program's digests hold losses, gradients and their norms, weights, and the state of the random numbers.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from commtrace.trace.files.reader import load_run
from tests.e2e.everything_on import EVERYTHING, NOTHING, assert_everything_was_on, assert_nobody_complained, places
from tests.e2e.launch import REPOSITORY, fork

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "every_training.py"
OF_TORCH = ("ddp_find_unused", "ddp_static_graph", "ddp_accumulates", "fsdp2", "fsdp1", "pipelining")
OF_DEEPSPEED = ("zero_1", "zero_3")


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install 'commtrace[deepspeed]'",
)


@pytest.mark.parametrize(
    "trainings", [OF_TORCH, pytest.param(OF_DEEPSPEED, marks=needs_deepspeed)], ids=["torch", "zero"]
)
def test_losses_gradients_and_weights_are_bitwise_equal(trainings: tuple[str, ...], tmp_path: Path) -> None:
    imports = ["deepspeed"] if trainings is OF_DEEPSPEED else []  # commtrace comes before it, where it records
    plain = digests_of(trainings, tmp_path / "plain", {**NOTHING, "DS_ACCELERATOR": "cpu"}, imports)
    recorded = digests_of(trainings, tmp_path / "run", EVERYTHING)

    assert sorted(plain) == sorted((rank, name) for rank in "01" for name in trainings)
    assert recorded == plain
    assert not (tmp_path / "plain").exists()
    run = load_run(tmp_path / "run")
    # DeepSpeed's own numbers, which begin at 1.
    assert_everything_was_on(run, tmp_path / "run", first_step=0 if trainings is OF_TORCH else 1)
    assert json.loads((tmp_path / "run" / "monitor.json").read_text())["ranks_heard"] == len(run.ranks)
    if trainings is OF_TORCH:
        assert list((tmp_path / "run" / "triggers").glob("*-signal-to-rank-*.json"))
        assert any(trace.triggers for trace in run.ranks.values())


def digests_of(
    trainings: tuple[str, ...], directory: Path, environment: dict[str, str], imports: Sequence[str] = ()
) -> dict[tuple[str, str], str]:
    variables = {**environment, **places(directory), "PYTHONPATH": str(REPOSITORY)}
    completed = fork([PROGRAM, *trainings], 2, variables, timeout=200, imports=imports)
    assert completed.returncode == 0, completed.stdout
    assert_nobody_complained(completed.stdout)
    found = re.findall(r"rank (\d) (\w+) computed (\w{64})", completed.stdout)
    return {(rank, name): digest for rank, name, digest in found}
