"""What all ranks have in common is told by the job's own past, or by another run."""

from __future__ import annotations

from typing import Any

import pytest

from commtrace.analysis.matched import Matched, match_run
from commtrace.analysis.replay.program import build_program
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.synth import Fault, Job, synthesize
from tests.findings.reading import why_not

ALL = ",".join(map(str, range(8)))


def simulated(*faults: str, **job: Any) -> Matched:
    sizes = {"dp": 8, "steps": 60, "microbatches": 4, **job}
    return match_run(synthesize(Job(**sizes, jitter=0.02, faults=tuple(map(Fault.parse, faults)))).run)


def baseline_of(matched: Matched) -> HealthyRun:
    program = build_program(matched.run, matched.matches)
    return HealthyRun.of(matched.run, StepStatistics.of(matched.run, program))


@pytest.fixture(scope="module")
def well() -> HealthyRun:
    return baseline_of(simulated())


def test_ranks_that_all_become_slower_are_told_since_when() -> None:
    matched = simulated(f"slow-rank={ALL}:1.3@30:60")
    findings = find_stragglers(matched.run, matched.matches)

    assert findings.slow == ()
    assert any("All ranks work longer from step 30 on, by 30%" in one for one in why_not(findings.findings))


def test_ranks_that_were_slower_for_a_while_are_past() -> None:
    matched = simulated(f"slow-rank={ALL}:1.3@20:40")

    assert why_not(find_stragglers(matched.run, matched.matches).findings) == ()


def test_ranks_that_are_all_slower_than_in_the_baseline(well: HealthyRun) -> None:
    matched = simulated(f"slow-rank={ALL}:1.3")
    findings = find_stragglers(matched.run, matched.matches, baseline=well)

    assert findings.slow == ()
    (said,) = why_not(findings.findings)
    assert said.startswith("All ranks work longer than in the baseline, by 30% (6")


def test_a_baseline_that_is_alike_says_nothing(well: HealthyRun) -> None:
    matched = simulated(seed=3)

    assert why_not(find_stragglers(matched.run, matched.matches, baseline=well).findings) == ()


def test_a_baseline_of_another_job_is_said_to_tell_nothing(well: HealthyRun) -> None:
    other, slower = simulated(pp=2, dp=4), baseline_of(simulated(microbatches=8))
    same = simulated()

    (stages,) = why_not(find_stragglers(other.run, other.matches, baseline=well).findings)
    (work,) = why_not(find_stragglers(same.run, same.matches, baseline=slower).findings)
    assert stages == "The baseline does not fit this run: it has 1 pipeline stage, and this run 2 pipeline stages."
    assert work.startswith("All ranks work less than in the baseline, by 4")


def test_most_stages_are_slower_than_in_the_baseline() -> None:
    well = baseline_of(simulated(pp=4, dp=2))
    matched = simulated("uneven-stage=0,1,3:1.25", pp=4, dp=2)

    (verdict,) = find_stragglers(matched.run, matched.matches, baseline=well).slow
    assert verdict.who == "stages 0–1, 3 (ranks 0–3, 6–7)"
    assert "25% more than in the baseline, compared with the other stages" in verdict.evidence


def test_ranks_without_peers_that_are_all_slower_than_in_the_baseline() -> None:
    well = baseline_of(simulated(pp=4, dp=1))
    matched = simulated("slow-rank=0,1,2,3:1.3", pp=4, dp=1)
    findings = find_stragglers(matched.run, matched.matches, baseline=well)

    assert findings.slow == ()
    assert any(
        said.startswith("All ranks work longer than in the baseline, by 30%") for said in why_not(findings.findings)
    )


def test_ranks_that_the_baseline_tells_are_said_to_be_compared_with_it(well: HealthyRun) -> None:
    matched = simulated("slow-rank=0,1,2,5,7:1.35")

    (verdict,) = find_stragglers(matched.run, matched.matches, baseline=well).slow
    assert set(verdict.ranks) == {0, 1, 2, 5, 7}
    assert "than the ranks that do the same work and are as fast as in the baseline" in verdict.evidence
