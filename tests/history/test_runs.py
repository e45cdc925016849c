"""history/runs.py: the runs of a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commtrace.errors import RunNotFoundError
from commtrace.history import runs
from commtrace.history.facts import fingerprint
from commtrace.history.runs import ListedRun, RunList, list_runs, remember
from commtrace.history.store import FILE_NAME, RunHistory
from commtrace.trace.files.reader import load_run
from tests.history.factory import BEGIN_NS, live, named, verdict, write_monitor, write_run
from tests.trace.rows import steps, write_rank

LATER_NS = BEGIN_NS + 3600 * 10**9


def listed(directory: Path) -> RunList:
    return list_runs(directory, now_ns=LATER_NS)


def only(found: RunList) -> ListedRun:
    (run,) = found.runs
    return run


def test_runs_are_listed_by_start_and_the_newest_is_the_last(tmp_path: Path) -> None:
    write_run(tmp_path / "a", session=2)
    early = write_run(tmp_path / "b", run_id="r2")
    (early / "notes").mkdir()

    found = listed(tmp_path)

    assert [(run.directory, run.state, run.problems) for run in found.runs] == [("a", "ended", ()), ("b", "ended", ())]
    assert found.problems == ()


def test_a_folder_without_a_run_is_listed_with_the_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn" / "rank-00000").mkdir(parents=True)
    (tmp_path / "torn" / "rank-00000" / "spans-0000.arrows").write_bytes(b"no segment")
    (tmp_path / ".hidden").mkdir()

    found = listed(tmp_path)

    assert [(run.directory, run.state) for run in found.runs] == [
        ("empty", "unreadable"), ("torn", "unreadable"), ("good", "ended"),
    ]  # fmt: skip
    assert found.runs[0].problems == ("It holds no recorded run (no rank-NNNNN folders).",)
    assert "spans-0000.arrows" in found.runs[1].problems[0]


def test_a_file_in_the_place_of_a_rank_does_not_end_the_list(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank-00000").write_text("no folder")

    assert [(run.directory, run.state) for run in listed(tmp_path).runs] == [("bad", "unreadable"), ("good", "ended")]


def test_a_link_to_a_run_beside_it_is_no_further_run(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    (tmp_path / "latest").symlink_to("good")

    assert only(listed(tmp_path)).directory == "good"


def test_a_run_that_ended_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    first = listed(tmp_path)
    reads = []
    monkeypatch.setattr(runs, "read_facts", lambda directory, **given: reads.append(directory))

    assert listed(tmp_path).runs == first.runs
    assert reads == []

    monkeypatch.undo()
    shutil.rmtree(run)
    write_run(tmp_path / "run", run_id="r2")
    again = only(listed(tmp_path)).facts
    assert again is not None
    assert again.run == "r2"


def test_a_run_that_goes_on_is_judged_anew_though_no_file_changed(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", steps(0, 8))

    running = only(list_runs(tmp_path, now_ns=BEGIN_NS + 10**9))

    assert (running.state, only(listed(tmp_path)).state) == ("running", "cut_off")


@pytest.mark.parametrize("loaded", [False, True])
def test_a_verdict_that_was_kept_is_listed(tmp_path: Path, loaded: bool) -> None:
    run = write_run(tmp_path / "run", hosts=("alpha", "beta"))
    judged = verdict(named())

    remember(load_run(run) if loaded else run, judged, now_ns=LATER_NS)

    assert only(listed(tmp_path)).verdict == judged
    assert RunHistory(tmp_path).entries()[0].fingerprint == fingerprint(run)


def test_a_verdict_on_an_earlier_attempt_is_not_that_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    remember(run, verdict(named()), now_ns=LATER_NS)
    write_run(tmp_path / "run", attempt=1, session=10**18)

    again = only(listed(tmp_path))

    assert again.facts is not None
    assert (again.facts.attempt, again.verdict) == (1, None)


def test_the_monitor_is_asked_where_nobody_else_judged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", hosts=("alpha", "beta"))
    write_monitor(run, findings=[live()])

    by_monitor = only(listed(tmp_path)).verdict
    remember(run, verdict(), now_ns=LATER_NS)
    by_analysis = only(listed(tmp_path)).verdict

    assert by_monitor is not None
    assert by_analysis is not None
    assert (by_monitor.by, by_monitor.hosts) == ("monitor", ("beta",))
    assert (by_analysis.by, by_analysis.hosts) == ("summary", ())


def test_a_damaged_file_of_the_monitor_is_a_problem_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "monitor.json").write_text("{")

    (problem,) = only(listed(tmp_path)).problems

    assert "monitor.json is not what a monitor writes" in problem


def test_findings_of_the_monitor_are_kept_without_another_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_monitor(run, findings=[live()])

    remember(run, None, now_ns=LATER_NS)

    (kept,) = RunHistory(tmp_path).entries()
    assert [one.source for one in kept.verdicts] == ["monitor"]


def test_a_damaged_history_is_reported_and_the_runs_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 100)

    found = listed(tmp_path)

    assert [run.directory for run in found.runs] == ["run"]
    assert [entry.directory for entry in found.entries] == ["run"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{tmp_path / FILE_NAME}: file is not a database.")


def test_deleted_runs_are_not_listed_but_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_run(tmp_path / "other", run_id="r2")
    listed(tmp_path)
    shutil.rmtree(run)

    found = listed(tmp_path)

    assert [one.directory for one in found.runs] == ["other"]
    assert sorted(entry.directory for entry in found.entries) == ["other", "run"]


@pytest.mark.parametrize("kind", ["missing", "file", "run", "empty"])
def test_a_path_that_holds_no_runs_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    messages = {
        "missing": "no such directory",
        "file": "is a file; pass a directory of runs",
        "run": "is one run; pass the directory around it",
        "empty": "holds no recorded run",
    }
    if kind == "file":
        path.write_text("")
    elif kind == "run":
        write_run(path)
    elif kind == "empty":
        path.mkdir()

    with pytest.raises(RunNotFoundError, match=messages[kind]):
        listed(path)
