"""Each cause of a straggler, injected into a real job of four ranks, is told from the others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.straggler import find_stragglers
from tests.e2e.launch import REPOSITORY, launch, run

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("stragglers")]
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "injected_causes.py"
MICROBATCHES, SLOW_FORWARD_MS = 8, 60
"""What the others need for a forward while ranks share few cores, a tenth to a half of this, makes it cost less."""
# A small model: where four ranks share few cores, what they compute would make each other late.
OPTIONS = ["--pipeline", "2", "--microbatches", str(MICROBATCHES), "--hidden", "64", "--sequence", "32"]
# The replicas of a stage are on different hosts: host a is ranks 0 and 2, host b ranks 1 and 3.
TWO_HOSTS = 'export COMMTRACE_NODE_ID=$([ $((LOCAL_RANK % 2)) = 0 ] && echo a || echo b); exec "$@"'

CAUSES: dict[str, tuple[str, set[int]]] = {
    "communication": ("communication", {1}),
    "data": ("data", {1}),
    "gc": ("gc", {1}),
    "stage": ("stage_imbalance", {2, 3}),
    "sequences": ("sequence_length_imbalance", {-1}),
    "host": ("host", {1, 3}),
}
"""By what is injected: the cause that is to be found, and of which ranks."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each cause, one in which a rank sleeps in every forward, and one in which nobody does."""
    folder = tmp_path_factory.mktemp("stragglers")
    for causes, iterations, wrapper in (
        (CAUSES, "12", ["--no-python", "bash", "-c", TWO_HOSTS, "bash", "python"]),
        (("forward", "nobody"), "24", []),
    ):
        environment = {
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = [*wrapper, PROGRAM, folder, *causes, "--", *OPTIONS, "--iterations", iterations]
        completed = launch(command, 4, environment, timeout=240)
        assert completed.returncode == 0, completed.stdout
    return folder


@pytest.mark.parametrize("injected", CAUSES)
def test_the_injected_cause_is_the_costliest_verdict(injected: str, runs: Path) -> None:
    analysis = analyse(runs / injected)
    found = find_stragglers(analysis.run, analysis.matches)
    assert found.verdicts, f"nothing was found; {injected} was injected; {found.abstentions}"
    cause, ranks = CAUSES[injected]
    assert (found.verdicts[0].cause, found.verdicts[0].rank in ranks) == (cause, True), found.verdicts


def stragglers(directory: Path) -> list[dict[str, Any]]:
    """What ``commtrace summary`` says of them."""
    commtrace = Path(sys.executable).with_name("commtrace")
    summary = run([str(commtrace), "summary", str(directory), "--json"])
    assert summary.returncode == 0, summary.stdout
    found: list[dict[str, Any]] = json.loads(summary.stdout)["stragglers"]
    return found


def test_a_rank_that_sleeps_in_every_forward_is_named_with_its_cost(runs: Path) -> None:
    named = stragglers(runs / "forward")

    assert [straggler["rank"] for straggler in named] == [1]
    assert named[0]["cause"] == "compute"
    # Every forward of the first stage is on the critical path of its pipeline, and the other replica waits for it.
    assert named[0]["cost_ms_per_step"] == pytest.approx(MICROBATCHES * SLOW_FORWARD_MS, rel=0.3)


def test_nobody_is_named_where_nobody_is_slow(runs: Path) -> None:
    assert stragglers(runs / "nobody") == []
