"""Each cause of a straggler, injected into a real job of four ranks, is told from the others."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import Counter
from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.straggler import find_stragglers
from commtrace.trace import schema
from commtrace.trace.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, launch, run
from tests.e2e.traces import rows

# Eight trainings before the first test.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
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


def test_a_rank_that_sleeps_in_every_forward_is_named_with_its_cost(runs: Path) -> None:
    summary = run([sys.executable, "-m", "commtrace", "summary", str(runs / "forward"), "--json"])
    assert summary.returncode == 0, summary.stdout
    costliest, *others = json.loads(summary.stdout)["stragglers"]

    assert (costliest["rank"], costliest["cause"]) == (1, "compute")
    # Every forward of the first stage is on the critical path of its pipeline, and the other replica waits for it.
    assert costliest["cost_ms_per_step"] == pytest.approx(MICROBATCHES * SLOW_FORWARD_MS, rel=0.3)
    work = work_ms_per_step(load_run(runs / "forward"))
    assert [one for one in others if not was_slow(one["rank"], one["cost_ms_per_step"], work)] == []


def test_nobody_is_named_where_nobody_is_slow(runs: Path) -> None:
    analysis = analyse(runs / "nobody")
    named = find_stragglers(analysis.run, analysis.matches).verdicts
    work = work_ms_per_step(analysis.run)
    assert [verdict for verdict in named if not was_slow(verdict.rank, verdict.cost_ms_per_step, work)] == [], work


def was_slow(rank: int, cost_ms: float, work_ms: list[float]) -> bool:
    """Whether the machine made a rank slow: other processes take a core away from some ranks and not from others.

    Then a rank needs longer than its replica, which computes the same, and by more than what that is said to cost.
    """
    replica = rank ^ 1
    return rank >= 0 and work_ms[rank] - work_ms[replica] >= cost_ms


def work_ms_per_step(recorded: Run) -> list[float]:
    """Of each rank, the median over steps of all its forwards, backwards and optimizer steps."""
    work = []
    for rank in sorted(recorded.ranks):
        spent: Counter[int] = Counter()
        for row in rows(recorded, rank, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER):
            spent[row["step"]] += row["end"] - row["start"]
        work.append(statistics.median(spent.values()) / 1e6)
    return work
