"""history/store.py: the file that keeps verdicts."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from commtrace.analysis.hangs.job_end import ENDED, EarlierAttempt, WentOn
from commtrace.history import store
from commtrace.history.store import FILE_NAME, HistoryError, RunHistory, StoredRun
from commtrace.history.verdicts import MONITOR
from tests.history.factory import entry, named, verdict


def directories(entries: list[StoredRun]) -> list[str]:
    return [one.directory for one in entries]


def test_a_kept_entry_is_read_again(tmp_path: Path) -> None:
    one = entry("one", verdict(named()), verdict(source=MONITOR))

    kept = RunHistory(tmp_path).keep([one])

    assert kept == [replace(one, id=1)]
    assert RunHistory(tmp_path).entries() == kept


def test_attempts_and_the_processes_that_went_on_are_read_again(tmp_path: Path) -> None:
    moved = (WentOn(1, 0, "alpha", 4711), WentOn(2, 1, "beta", 4712))
    before = EarlierAttempt(0, 3, first_step=0, last_step=9, state=ENDED, ending="", went_on=moved)

    kept = RunHistory(tmp_path).keep([entry("one", verdict(named()), attempt=1, earlier_attempts=(before,))])

    assert kept[0].facts.earlier_attempts == (before,)
    assert RunHistory(tmp_path).entries() == kept


def test_without_a_file_nothing_is_known_and_none_is_made(tmp_path: Path) -> None:
    assert RunHistory(tmp_path).entries() == []
    assert list(tmp_path.iterdir()) == []


def test_a_newer_verdict_of_the_same_source_takes_the_place(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry("one", verdict(named(cost=1.0)), verdict(named(), source=MONITOR))])

    (kept,) = history.keep([entry("one", verdict(named(cost=2.0)))])

    assert [(one.source, one.named[0].cost_ms_per_step) for one in kept.verdicts] == [
        ("analysis", 2.0),
        ("monitor", 3.0),
    ]


def test_a_restart_is_the_same_job_with_more_hosts(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry("one", verdict(named()))])

    again = verdict(named("gamma"), attempt=1)
    (kept,) = history.keep([entry("one", again, attempt=1, session=10**18, hosts=("alpha", "gamma"))])

    assert kept.hosts == ("alpha", "beta", "gamma")
    assert [one.attempt for one in kept.verdicts] == [0, 1]
    assert kept.facts.attempt == 1


def test_another_job_of_the_same_name_in_the_same_directory_is_another_entry(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry("one", verdict(named()))])

    kept = history.keep([entry("one", session=10**18)])

    assert [(one.directory, len(one.verdicts)) for one in kept] == [("one", 1), ("one", 0)]


def test_ranks_whose_files_came_later_are_of_the_same_job(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry("one", verdict(named()), session=2 * 10**9)])

    (kept,) = history.keep([entry("one", session=10**9)])

    assert len(kept.verdicts) == 1


def test_a_run_whose_directory_was_renamed_stays_one_entry(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry("one", verdict(named()))])

    (kept,) = history.keep([replace(entry("one"), directory="two")])

    assert (kept.directory, len(kept.verdicts)) == ("two", 1)


def test_a_copy_beside_the_run_is_an_entry_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    history = RunHistory(tmp_path)
    history.keep([entry("one")])

    assert directories(history.keep([replace(entry("one"), directory="two")])) == ["one", "two"]


def test_entries_of_deleted_runs_stay(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry("one"), entry("two")])

    assert directories(history.keep([entry("three")])) == ["one", "two", "three"]


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    source = (
        "import sys\nfrom pathlib import Path\nfrom commtrace.history import store\n"
        "from commtrace.history.store import RunHistory\nstore._SECONDS_TO_WAIT = 60.0\n"
        "from tests.history.factory import entry\n"
        "for number in range(5):\n    RunHistory(Path(sys.argv[1])).keep([entry(f'{sys.argv[2]}-{number}')])\n"
    )
    root = Path(__file__).resolve().parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", source, str(tmp_path), name], cwd=root, stderr=subprocess.PIPE)
        for name in ("a", "b", "c")
    ]
    for writer in writers:
        _, error = writer.communicate(timeout=120)
        assert (writer.returncode, error) == (0, b"")

    expected = sorted(f"{name}-{number}" for name in "abc" for number in range(5))
    assert sorted(directories(RunHistory(tmp_path).entries())) == expected


def test_a_writer_that_holds_the_lock_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SECONDS_TO_WAIT", 0.01)
    history = RunHistory(tmp_path)
    history.keep([entry("one")])

    with closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(HistoryError, match=r"database is locked\. Another process writes to it"):
            history.keep([entry("two")])

    assert directories(history.entries()) == ["one"]


def test_a_damaged_file_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 100)

    for use in (RunHistory(tmp_path).entries, lambda: RunHistory(tmp_path).keep([entry()])):
        with pytest.raises(HistoryError, match=r"file is not a database\. If it is damaged, delete it"):
            use()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"unable to open database file\. Is the directory writable\?"):
        RunHistory(tmp_path / "gone").keep([entry()])


def test_a_directory_in_the_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()

    with pytest.raises(HistoryError, match=r"is no file\. Move it away"):
        RunHistory(tmp_path).entries()


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        other.execute("CREATE TABLE songs (title TEXT)")

    with pytest.raises(HistoryError, match=r"is a database of another program\. Move it away"):
        RunHistory(tmp_path).keep([entry()])


def test_a_view_in_the_place_of_a_table_is_not_read(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry()])
    with closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        other.execute("DROP TABLE verdicts")
        other.execute("CREATE VIEW verdicts AS SELECT 1 AS run, 0 AS attempt, '' AS source, '' AS verdict")

    with pytest.raises(HistoryError, match="of another program"):
        history.entries()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry()])
    with closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        other.execute("PRAGMA user_version = 2")

    with pytest.raises(HistoryError, match=r"has format 2; this commtrace reads up to 1\. Update it"):
        history.entries()


@pytest.mark.parametrize(
    ("column", "value"), [("facts", "{}"), ("facts", 7), ("hosts", '"alpha"'), ("facts", '{"run": 1e999}')]
)
def test_a_row_that_commtrace_did_not_write_is_an_error(tmp_path: Path, column: str, value: object) -> None:
    history = RunHistory(tmp_path)
    history.keep([entry()])
    with closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        other.execute(f"UPDATE runs SET {column} = ?", (value,))

    with pytest.raises(HistoryError, match="a row is not what commtrace keeps"):
        history.entries()
