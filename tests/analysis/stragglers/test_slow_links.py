"""Slow links and networks of synthetic jobs: in a part of a run only, and where others do not tell what is normal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commtrace.analysis.matched import match_run
from commtrace.analysis.replay.program import build_program
from commtrace.analysis.replay.step_statistics import StepStatistics, TransferLink
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.analysis.stragglers.slow_links import suspicions_of
from commtrace.synth import Fault, Job, synthesize
from tests.analysis.stragglers.judged_jobs import found, judged
from tests.findings.reading import ms, why_not

MS = 1_000_000
STAGES: dict[str, Any] = {
    "pp": 4, "dp": 2, "gpus_per_host": 2, "microbatches": 8, "layers": 4, "sequence": 16_384, "steps": 40,
    "forward_ns": 15 * MS, "backward_ns": 30 * MS,
}  # fmt: skip
"""Each of four stages on a host of its own."""

TWO_HOSTS: dict[str, Any] = {**STAGES, "pp": 2, "dp": 4, "gpus_per_host": 4, "layers": 2, "sequence": 2048}
BETWEEN = "network between hosts node0, node1 (ranks 0–7)"


@pytest.mark.parametrize(
    ("fault", "first", "end", "job", "who"),
    [
        ("slow-link=2-4:10", 20, 40, STAGES, "link between rank 2 on node1 and rank 4 on node2"),
        ("slow-link=2-4:100", 30, 40, STAGES, "link between rank 2 on node1 and rank 4 on node2"),
        ("slow-network=2:6", 0, 15, STAGES, "network of host node2 (ranks 4–5)"),
        ("slow-network=1:50", 20, 40, TWO_HOSTS, BETWEEN),
    ],
)
def test_a_link_slow_in_a_part_of_the_run_is_named_with_these_steps(
    fault: str, first: int, end: int, job: dict[str, Any], who: str
) -> None:
    findings, cost_ms = judged([f"{fault}@{first}:{end}"], **job)

    (verdict,) = findings.slow
    assert (verdict.who, verdict.cause) == (who, "communication")
    (stretch,) = verdict.stretches
    assert (stretch.first, stretch.last) == (max(first, 1), end - 1)  # the first step warms up
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)
    assert ms(stretch.cost_ns) == pytest.approx(cost_ms * 40 / (end - first), rel=0.1)


def test_a_network_that_becomes_slow_is_compared_with_its_past() -> None:
    findings = found(["slow-network=1:50@20:40"], **TWO_HOSTS)

    assert "times as long, after all participants have arrived, as in the steps in which they were fast" in (
        findings.slow[0].evidence
    )


def test_a_network_that_is_always_slow_is_answered_with_what_would_show_it() -> None:
    findings = found(["slow-network=1:50"], **TWO_HOSTS)

    assert findings.slow == ()
    (said,) = why_not(findings.findings)
    assert said.startswith("Transfers between hosts take 65% of a step, 7")
    assert "most of it all_reduce of 524.3 MB in 5" in said
    assert said.endswith("(--baseline RUN) or a bandwidth test between pairs of hosts decides.")


def test_lost_communications_do_not_count_among_the_transfers_between_hosts() -> None:
    run = synthesize(Job(tp=2, pp=1, dp=3, microbatches=4, steps=9, missing=0.05, jitter=0, seed=78, gpus_per_host=2))
    matched = match_run(run.run)

    (said,) = why_not(find_stragglers(matched.run, matched.matches).findings)
    assert said.startswith("Transfers between hosts take ")


def test_another_run_tells_that_the_network_is_slow() -> None:
    well, slow = (
        match_run(synthesize(Job(**TWO_HOSTS, jitter=0.02, faults=faults)).run)
        for faults in ((), (Fault.parse("slow-network=1:50"),))
    )
    baseline = HealthyRun.of(well.run, StepStatistics.of(well.run, build_program(well.run, well.matches)))

    (verdict,) = find_stragglers(slow.run, slow.matches, baseline=baseline).slow
    assert (verdict.who, verdict.cause) == (BETWEEN, "communication")
    assert "as in the baseline" in verdict.evidence
    assert find_stragglers(well.run, well.matches, baseline=baseline).slow == ()


def test_most_links_that_are_slower_than_a_few_are_not_named_but_said() -> None:
    # Three of four data-parallel groups of two, all within their hosts: no host tells them apart.
    slow = [f"slow-link={first}-{first + 1}:40" for first in (2, 4, 6)]
    findings = found(slow, **STAGES)

    assert findings.slow == ()
    (said,) = why_not(findings.findings)
    assert "3 of 4 links take 39.9 times as long as the fastest that carry the same" in said
    assert "With all as fast as these, a step would be" in said


LONG_MESSAGES: dict[str, Any] = {"pp": 2, "dp": 4, "tp": 2, "steps": 30, "sequence": 8192}


@pytest.mark.parametrize(
    ("faults", "who"),
    [
        (["slow-send=1-9:8"], "link from rank 1 on node0 to rank 9 on node1"),
        (["slow-send=9-1:8"], "link from rank 9 on node1 to rank 1 on node0"),
        (["slow-send=1-9:8", "slow-send=9-1:8"], "link between rank 1 on node0 and rank 9 on node1"),
        (["slow-send=1-9:8", "slow-send=9-1:1.8"], "link between rank 1 on node0 and rank 9 on node1"),
    ],
)
@pytest.mark.parametrize("window", ["", "@12:17"])
def test_a_direction_is_named_where_the_other_one_is_certainly_not_slow(
    faults: list[str], who: str, window: str
) -> None:
    findings = found([fault + window for fault in faults], **LONG_MESSAGES)

    assert [finding.who for finding in findings.slow] == [who]


@pytest.mark.parametrize(
    ("slow", "quick", "who"),
    [
        ([0], [1], "link from rank 1 on node0 to rank 0 on node0"),
        ([1], [0], "link from rank 0 on node0 to rank 1 on node0"),
        ([0], [], "link between rank 0 on node0 and rank 1 on node0"),  # the other one is not known, or nearly slow
        ([0, 1], [], "link between rank 0 on node0 and rank 1 on node0"),
        ([2], [3], "link between rank 2 on node0 and rank 3 on node0"),  # a group of two
        ([4], [], "link between rank 0 on node0 and rank 2 on node0"),  # nothing passes in the other direction
    ],
)
def test_the_words_for_a_link_do_not_depend_on_what_is_not_known(slow: list[int], quick: list[int], who: str) -> None:
    run = synthesize(Job(pp=2, dp=2, steps=1)).run
    links = [
        TransferLink((1, 0), is_directed=True),
        TransferLink((0, 1), is_directed=True),
        TransferLink((2, 3), is_directed=False),
        TransferLink((3, 2), is_directed=True),
        TransferLink((2, 0), is_directed=True),
    ]
    number = np.arange(len(links))

    (suspicion,) = suspicions_of(
        run, links, np.ones(len(links), np.bool_), np.isin(number, slow), np.isin(number, quick)
    )

    assert (suspicion.who, suspicion.rows) == (who, frozenset(slow))
