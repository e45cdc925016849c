"""Each cause of a straggler, injected into a real job of four ranks, is told from the others."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.cli.main import app
from commtrace.findings.finding import Finding
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, fork_with_megatron
from tests.e2e.traces import rows
from tests.findings.reading import in_json, ms, why_not

# Eight trainings before the first test.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "injected_causes.py"
MICROBATCHES, SLOW_FORWARD_MS = 4, 60
"""What the others need for a forward while ranks share few cores, a tenth to a half of this, makes it cost less."""
# A small model: where four ranks share few cores, what they compute would make each other late.
OPTIONS = [
    "--pipeline", "2", "--microbatches", str(MICROBATCHES), "--layers", "2", "--hidden", "64", "--sequence", "32",
]  # fmt: skip

CAUSES: dict[str, tuple[tuple[str, ...], str | None, set[int]]] = {
    "communication": (("communication",), None, {1}),
    "data": (("data",), "ranks", {1}),
    "gc": (("gc",), "ranks", {1}),
    "stage": (("stage_imbalance",), "stage", {2, 3}),
    "sequences": (("sequence_length_imbalance",), "job", {-1}),
    "host": (("compute", "forward", "backward", "optimizer"), "host", {1, 3}),
}
"""By what is injected: the causes that are right, the place if only one is, and the ranks."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each cause, one in which a rank sleeps in every forward, and one in which nobody does."""
    folder = tmp_path_factory.mktemp("stragglers")
    trainings = [*(f"{cause}=12" for cause in CAUSES), "forward=12", "nobody=24"]
    completed = fork_with_megatron(
        [PROGRAM, folder, *trainings, "--", *OPTIONS], 4, {"PYTHONPATH": str(REPOSITORY)}, timeout=400
    )
    assert completed.returncode == 0, completed.stdout
    return folder


@pytest.mark.parametrize("injected", CAUSES)
def test_the_injected_cause_is_the_costliest_verdict(injected: str, runs: Path) -> None:
    analysis = analyse(runs / injected)
    found = find_stragglers(analysis.run, analysis.matches)
    causes, place, ranks = CAUSES[injected]
    hits = [
        number
        for number, one in enumerate(found.slow)
        if one.cause in causes and one.place == (place or one.place) and one.rank in ranks
    ]
    assert hits, f"{injected} was injected; {found.slow} {why_not(found.findings)}"
    assert_were_slow(found.slow[: hits[0]], analysis.run)


def test_a_rank_that_sleeps_in_every_forward_is_named_with_its_cost(runs: Path) -> None:
    summary = CliRunner().invoke(app, ["summary", str(runs / "forward"), "--json"])
    assert summary.exit_code == 0, summary.output
    costliest = in_json(json.loads(summary.stdout))[0]

    assert (costliest["ranks"][0], costliest["cause"] in ("compute", "forward")) == (1, True)
    # Every forward of the first stage is on the critical path of its pipeline, and the other replica waits for it. It
    # costs so much less as a busy machine makes one of the others slow, too: they would wait for that one instead.
    slept = MICROBATCHES * SLOW_FORWARD_MS
    assert costliest["cost_ns"] / 1e6 < 1.3 * slept
    excess = excess_ms(load_run(runs / "forward"), 1, others=(0, 2, 3))
    assert costliest["cost_ns"] / 1e6 > 0.7 * min(slept, excess)


def test_nobody_is_named_where_nobody_is_slow(runs: Path) -> None:
    analysis = analyse(runs / "nobody")
    assert_were_slow(find_stragglers(analysis.run, analysis.matches).slow, analysis.run)


def assert_were_slow(verdicts: Sequence[Finding], recorded: Run) -> None:
    """Nobody is named on an idle machine. On a busy one, other processes take a core away from some of the ranks.

    Such ranks really were slow: they needed longer than their replicas, by as much as that is said to have cost.
    """
    for verdict in verdicts:
        assert verdict.rank >= 0, verdict
        replicas = {rank: rank ^ 1 for rank in verdict.ranks}  # which compute the same
        excess = sum(excess_ms(recorded, rank, others=(replica,)) for rank, replica in replicas.items())
        assert ms(verdict.cost_ns) <= excess, verdict


def excess_ms(recorded: Run, rank: int, others: Sequence[int]) -> float:
    """By how much a rank works longer than the slowest of the others: the mean over all steps."""
    own = work_ms(recorded, rank)
    theirs = [work_ms(recorded, other) for other in others]
    return statistics.fmean(max(0.0, own[step] - max(other[step] for other in theirs)) for step in own)


def work_ms(recorded: Run, rank: int) -> Counter[int]:
    """By step: all forwards, backwards and optimizer steps of a rank."""
    spent: Counter[int] = Counter()
    for row in rows(recorded, rank, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER):
        spent[row["step"]] += (row["end"] - row["start"]) / 1e6
    return spent
