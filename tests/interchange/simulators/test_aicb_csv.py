from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.summary import summarise
from commtrace.cli.main import app
from commtrace.errors import ImportFileError
from commtrace.interchange.simulators.aicb_csv import import_aicb_csv
from commtrace.interchange.simulators.aicb_log import log_of_rank, write_log
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.interchange.simulators.aicb_files import COMPUTE, END, GATHER, INIT, SEND, write
from tests.reference import reference_data

MS = 1_000_000


def test_epochs_are_the_init_phase_and_steps(tmp_path: Path) -> None:
    lines = [INIT, END.format(7.0), COMPUTE, GATHER, SEND, END.format(10.0), GATHER, END.format(1.0)]

    imported = import_aicb_csv(write(tmp_path / "log.csv", *lines), tmp_path / "run")

    spans = load_run(tmp_path / "run").ranks[0].spans
    steps = spans.kind == schema.STEP
    # the second step is as long as its calls, which took longer than its epoch_end says
    assert list(zip(spans.start[steps].tolist(), spans.end[steps].tolist(), strict=True)) == [
        (7 * MS, 17 * MS),
        (17 * MS, 19 * MS),
    ]
    sent = spans.kind == schema.P2P
    assert (spans.start[sent][0], spans.end[sent][0]) == (13 * MS, 13 * MS + MS // 4)
    assert (spans.peer[sent][0], spans.bytes[sent][0]) == (3, 512)
    work = spans.kind == schema.PHASE
    assert (spans.start[work][0], spans.end[work][0]) == (7 * MS, 11 * MS)
    assert spans.step.min() == -1
    assert imported.notes[-1].startswith("The bandwidths in the log are GiB/s.")


def test_bandwidths_follow_from_bytes_and_times_in_gb(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", INIT, END.format(2), GATHER, END.format(3), GATHER, END.format(3))

    import_aicb_csv(tmp_path / "log.csv", tmp_path / "run")

    row = next(row for row in summarise(tmp_path / "run").communication if row.operation == "all_gather")
    assert (row.role, row.group_size) == ("tp", 2)
    assert row.algbw_gbps == pytest.approx(536.87, abs=0.01)  # 500 GiB/s
    assert row.busbw_gbps == pytest.approx(268.44, abs=0.01)


def test_the_reference_log_has_gb_and_one_group_size_for_all(tmp_path: Path) -> None:
    path = reference_data("aicb", "measured_A100_head.csv")

    imported = import_aicb_csv(path, tmp_path / "run")

    assert [note for note in imported.notes if "bandwidth" in note] == [
        "The log does not say how many ranks ep_group has: there is no bus bandwidth for it.",
        "The bandwidths in the log are GB/s. Those that commtrace prints are GB/s, from bytes and times.",
        "The bus bandwidths in the log are those of groups of 8 ranks, which it has not.",
    ]
    assert "The last epoch is not complete: it is as long as its calls." in imported.notes
    summary = summarise(tmp_path / "run")
    assert {row.role: row.group_size for row in summary.communication} == {"dp": 4, "tp": 2, "ep": None}
    assert sum(row.count for row in summary.communication) == 391


def test_exported_rows_come_back(tmp_path: Path) -> None:
    lines = [INIT, END.format(7.0), GATHER, SEND, END.format(10.0), GATHER, END.format(2.0)]
    import_aicb_csv(write(tmp_path / "log.csv", *lines), tmp_path / "run")

    write_log(log_of_rank(load_run(tmp_path / "run"), 0), tmp_path / "again.csv")
    import_aicb_csv(tmp_path / "again.csv", tmp_path / "twice")

    first, second = (load_run(tmp_path / name).ranks[0].spans for name in ("run", "twice"))
    for column in ("kind", "start", "end", "bytes", "step", "peer", "group"):
        assert getattr(first, column).tolist() == getattr(second, column).tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GATHER.rpartition(",")[0], "line 3: it has 11 of 12 fields"),
        (GATHER.replace("all_gather", "gather_all"), "line 3: comm_type 'gather_all' is none of AICB's"),
        (GATHER.replace(",2,", ",two,"), "line 3: comm_group_size is 'two', not a whole number"),
        (GATHER.replace(",2,", ",0,"), "line 3: comm_group_size is 0"),
        (GATHER.replace("1073741824", "-4"), "line 3: msg_size is '-4'"),
        (GATHER.replace(",2.0,", ",nan,"), "line 3: _elapsed_time is 'nan', not a number"),
        (GATHER.replace(",2.0,", ",None,"), "line 3: _elapsed_time is missing: this is a workload that was not run"),
        (SEND.replace(",3,None", ",-3,None"), "line 3: dst or src is '-3'"),
        (GATHER.replace("CommGroup.tp_group", "a b"), "line 3: comm_group 'a b' is no name"),
        ('"CommType', "is damaged, or no CSV"),
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "log.csv", INIT, line)

    with pytest.raises(ImportFileError) as raised:
        import_aicb_csv(path, tmp_path / "run")

    assert message in str(raised.value)


@pytest.mark.parametrize(("text", "message"), [("", "is no log of AICB"), ("a,b\n1,2\n", "begins with a, b")])
def test_another_file_is_told_apart(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log.csv").write_text(text)

    with pytest.raises(ImportFileError, match=message):
        import_aicb_csv(tmp_path / "log.csv", tmp_path / "run")


def test_a_log_without_calls_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="it holds a header only"):
        import_aicb_csv(write(tmp_path / "log.csv"), tmp_path / "run")


def test_the_command_takes_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", INIT, END.format(2), GATHER, END.format(3))
    runner = CliRunner()

    result = runner.invoke(app, ["import", "aicb-csv", str(path), "-o", str(tmp_path / "run")])
    two = runner.invoke(app, ["import", "aicb-csv", str(path), str(path), "-o", str(tmp_path / "other")])

    assert (result.exit_code, two.exit_code) == (0, 2)
    assert "An AICB log has one rank and no start times" in result.stderr
    assert "aicb-csv takes the one log of a benchmark, and 2 were given." in two.stderr
