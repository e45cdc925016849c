"""history/verdicts.py: verdicts as they are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from commtrace.errors import TraceFormatError
from commtrace.findings.finding import Finding, Member, not_judged
from commtrace.findings.status import MonitorStatus
from commtrace.history.verdicts import Named, RunVerdict, verdict_of_analysis, verdict_of_monitor
from commtrace.live.monitoring.standing import found
from commtrace.trace.json_values import fields_to_json
from tests.findings.reading import slow
from tests.history.factory import live, write_monitor
from tests.live.findings import hang_finding, silent_finding, slow_finding


def event(kind: str, finding: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "time_ns": 5, "finding": finding, "sentence": "Said."}


def kept(*findings: Finding) -> RunVerdict:
    return verdict_of_analysis(findings, by="summary", attempt=2, judged_ns=9, last_step=7)


def test_the_costliest_is_kept_first() -> None:
    found = kept(slow(1.0), slow(2.0, "data"))

    assert found == RunVerdict(
        "analysis", "summary", 2, 9, 7,
        (
            Named("rank 1 on beta", "ranks", "data", 2.0, "", (1,), ("beta",), 0.1, "slow/ranks/data/1",
                  "rank 1 on beta, input: 2 ms per step (10.0% of it)"),
            Named("rank 1 on beta", "ranks", "compute", 1.0, "", (1,), ("beta",), 0.1, "slow/ranks/compute/1",
                  "rank 1 on beta, compute: 1 ms per step (10.0% of it)"),
        ),
    )  # fmt: skip
    assert found.hosts == ("beta",)


def test_every_host_of_a_link_is_named() -> None:
    members = (Member(1, "beta", 1.0), Member(4, "gamma", 1.0))

    assert kept(slow(1.0, "communication", place="link", members=members)).hosts == ("beta", "gamma")


@pytest.mark.parametrize("cause", ["stage_imbalance", "sequence_length_imbalance"])
def test_work_that_is_divided_unevenly_is_no_fault_of_a_host(cause: str) -> None:
    found = kept(slow(1.0, cause))

    assert (len(found.named), found.hosts) == (1, ())


def test_nobody_named_is_a_judgement_unless_something_could_not_be_judged() -> None:
    assert kept().is_judged
    assert not kept(not_judged("ranks", "too few steps")).is_judged
    assert kept(slow(1.0), not_judged("stage", "pipeline")).is_judged


def test_the_monitor_named_what_its_events_and_its_status_say(tmp_path: Path) -> None:
    write_monitor(
        tmp_path,
        event("found", live(cost_ns=9e6)),
        event("changed", live(cost_ns=4e6)),
        event("recovered", live(cause="gc")),
        event("found", fields_to_json(silent_finding(2))),
        findings=[live("alpha", "data", cost_ns=5e6), fields_to_json(hang_finding())],
    )

    found = verdict_of_monitor(tmp_path, attempt=1)

    assert found is not None
    assert (found.source, found.by, found.attempt, found.last_step) == ("monitor", "monitor", 1, 7)
    assert [(one.who, one.cause, one.cost_ms_per_step) for one in found.named] == [
        ("rank 1 on alpha", "data", 5.0), ("rank 1 on beta", "compute", 4.0),
    ]  # fmt: skip


def test_the_files_of_a_real_monitor_are_read(tmp_path: Path) -> None:
    slow = slow_finding(3, who="rank 3 on beta", hosts=("beta",), cost_ns=7.5e6)
    status = MonitorStatus(time_ns=2 * 10**18, last_step=41, findings=(slow,))
    write_monitor(tmp_path, fields_to_json(found(slow, 10**18, "GPU")))
    (tmp_path / "monitor.json").write_text(json.dumps(fields_to_json(status)))

    verdict = verdict_of_monitor(tmp_path, attempt=0)

    assert verdict is not None
    assert (verdict.judged_ns, verdict.last_step) == (2 * 10**18, 41)
    (named,) = verdict.named
    assert (named.id, named.text) == (slow.id, slow.line())
    assert (named.ranks, named.hosts, named.cost_ms_per_step) == ((3,), ("beta",), 7.5)


def test_a_torn_line_of_the_monitor_is_passed_over(tmp_path: Path) -> None:
    write_monitor(tmp_path, event("found", live()))
    with (tmp_path / "monitor.jsonl").open("a") as file:
        file.write('{"kind": "found", "find')

    found = verdict_of_monitor(tmp_path, attempt=0)

    assert found is not None
    assert [one.who for one in found.named] == ["rank 1 on beta"]


def test_a_monitor_that_saw_no_step_did_not_judge(tmp_path: Path) -> None:
    write_monitor(tmp_path, last_step=-1)

    found = verdict_of_monitor(tmp_path, attempt=0)

    assert found is not None
    assert not found.is_judged


def test_without_a_monitor_there_is_no_verdict(tmp_path: Path) -> None:
    assert verdict_of_monitor(tmp_path, attempt=0) is None


def test_another_monitor_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "monitor.json").write_text('{"time_ns": "noon"}')

    with pytest.raises(TraceFormatError, match=r"monitor\.json is not what a monitor writes"):
        verdict_of_monitor(tmp_path, attempt=0)


def test_words_of_a_monitor_cannot_move_the_cursor(tmp_path: Path) -> None:
    write_monitor(tmp_path, findings=[live("be\x1b[2Jta")])

    found = verdict_of_monitor(tmp_path, attempt=0)

    assert found is not None
    assert found.hosts == ("be\\x1b[2Jta",)


def test_the_costliest_stands_for_all_in_a_line() -> None:
    both = kept(slow(1.0), slow(224.0, "forward", share=0.629))
    assert both.text == "rank 1 on beta, slow forward: 224 ms per step (62.9% of it); 1 more"
    assert kept().text == "nothing found"
    assert kept(not_judged("ranks", "too few steps")).text == "nothing found, but not all could be judged"


def test_a_larger_loss_stands_before_the_costliest_that_is_slow_and_is_nobodys_fault() -> None:
    loss = Finding(id="lost/job/transfer", kind="lost", place="job", cause="transfer", cost_ns=30e6, share=0.3)
    found = kept(slow(9.0), loss, slow(1.0, "data"), replace(loss, id="lost/job/data", cause="data", share=0.001))

    assert found.text == (
        "exposed communication: 30 ms per step (30.0% of it); rank 1 on beta, compute: 9 ms per step (10.0% of it); "
        "1 more"
    )
    assert ([one.id for one in found.losses], found.hosts) == (["lost/job/transfer"], ("beta",))
