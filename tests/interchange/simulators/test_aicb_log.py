"""AICB's log and tables of a rank whose every time is known."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commtrace.errors import ConfigurationError
from commtrace.interchange.simulators.aicb_log import (
    COLUMNS,
    IterationTimes,
    LoggedCall,
    calls_by_size,
    log_of_rank,
    write_calls,
    write_iterations,
    write_log,
)
from commtrace.trace.run import Run
from tests.factory import collective, group, make_run, p2p, span
from tests.reference import reference_data

MS = 1_000_000
TP, PP, CP = group("tp", 0, 1), group("pp", 0, 2, ordinal=1), group("cp", 0, 1, ordinal=2)


def job() -> Run:
    rows = [
        collective("all_reduce", TP, 0, 0, 4 * MS, bytes=8, id=0),
        span("step", 10 * MS, 30 * MS, step=0),
        span("forward", 10 * MS, 20 * MS, step=0, microbatch=0),
        collective("all_gather", TP, 1, 11 * MS, 13 * MS, bytes=1 << 30, id=1, step=0),
        p2p("send", PP, 2, 0, 14 * MS, 15 * MS, bytes=512, id=2, step=0),
        span("backward", 20 * MS, 29 * MS, step=0, microbatch=0),
        p2p("recv", PP, 2, 0, 21 * MS, 22 * MS, bytes=512, id=3, step=0),
        span("step", 30 * MS, 40 * MS, step=1),
        # two operations of one coalesced call
        collective("reduce_scatter", TP, 2, 31 * MS, 33 * MS, bytes=1000, id=4, step=1, op_in_seq=0),
        collective("reduce_scatter", TP, 2, 31 * MS, 33 * MS, bytes=24, id=5, step=1, op_in_seq=1),
        collective("broadcast", CP, 0, 34 * MS, 35 * MS, bytes=16, peer=1, id=6, step=1),
        collective("gather", TP, 3, 36 * MS, 37 * MS, bytes=16, peer=1, id=7, step=1),
        collective("all_reduce", TP, 4, 50 * MS, 51 * MS, bytes=16, id=8, step=-1),
    ]
    return make_run({0: rows}, [TP, PP, CP], world_size=4)


def test_the_init_phase_and_each_step_are_apart() -> None:
    log = log_of_rank(job(), 0)

    assert log.init == (LoggedCall("all_reduce", "tp_group", 2, 8, "init", 4 * MS),)
    assert log.init_ns == 10 * MS
    assert log.steps == (
        (
            LoggedCall("all_gather", "tp_group", 2, 1 << 30, "forward", 2 * MS),
            LoggedCall("isend", "pp_group", 2, 512, "forward", MS, destination=2),
            LoggedCall("irecv", "pp_group", 2, 512, "backward", MS, source=2),
        ),
        (
            LoggedCall("reduce_scatter", "tp_group", 2, 1024, "step", 2 * MS),
            LoggedCall("broadcast", "cp_group", 2, 16, "step", MS, source=1),
        ),
    )
    assert log.step_ns == (20 * MS, 10 * MS)


def test_rows_that_aicb_cannot_hold_are_reported() -> None:
    assert log_of_rank(job(), 0).notes == (
        "1 calls are left out: AICB has no operation gather.",
        "1 calls are left out: began after the last step.",
        "AICB has no such groups: cp_group. Its analyser reads them, its replay does not.",
    )


def test_the_file_has_the_12_columns_and_gib_per_second(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"

    assert write_log(log_of_rank(job(), 0), path) == 9

    lines = path.read_text().splitlines()
    assert lines[0] == (
        "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count"
    )
    assert lines[1:5] == [
        "CommType.all_reduce,CommGroup.tp_group,2,8,init,None,None,,4.0,0.0,0.0,1",
        "CommType.epoch_end,None,None,0,,None,None,,10.0,0.0,0.0,1",
        "CommType.all_gather,CommGroup.tp_group,2,1073741824,forward,None,None,,2.0,500.0,250.0,1",
        "CommType.isend,CommGroup.pp_group,2,512,forward,2,None,,1.0,0.0,0.0,1",
    ]


def test_the_tables_have_their_units(tmp_path: Path) -> None:
    log = log_of_rank(job(), 0)
    write_calls(calls_by_size(log), tmp_path / "communication.csv")
    write_iterations(IterationTimes.of(log), tmp_path / "iterations.csv")

    with (tmp_path / "communication.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["phase"], row["comm_type"], row["msg_bytes"], row["count"]) for row in rows] == [
        ("init", "all_reduce", "8", "1"),
        ("train", "all_gather", "1073741824", "1"),
        ("train", "broadcast", "16", "1"),
        ("train", "irecv", "512", "1"),
        ("train", "isend", "512", "1"),
        ("train", "reduce_scatter", "1024", "1"),
    ]
    assert rows[1]["busbw_GiBps_mean"] == "250.0"
    assert (tmp_path / "iterations.csv").read_text() == (
        "init_ms,max_ms,min_ms,mean_ms,p90_ms,std_ms\n20.0,20.0,10.0,15.0,20.0,5.0\n"
    )


def test_a_rank_or_a_step_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="rank 7 was not recorded; the run has 1 ranks, 0 to 0"):
        log_of_rank(job(), 7)
    with pytest.raises(ConfigurationError, match="rank 0 recorded no step"):
        log_of_rank(make_run({0: [span("forward", 0, 1)]}), 0)


_AICB = os.environ.get("COMMTRACE_AICB", "")

_ANALYSER = """
import csv, sys
sys.path.insert(0, sys.argv[1])
path = sys.argv[2]
sys.argv = sys.argv[:1]
from log_analyzer.log import Log, LogItem
from utils.utils import CommType
log = Log()
for row in csv.DictReader(open(path)):
    size = None if row["comm_group_size"] == "None" else int(row["comm_group_size"])
    item = LogItem(comm_type=CommType.get_comm_type(row["comm_type"].split(".")[1]), comm_group=row["comm_group"],
                   comm_group_size=size, msg_size=int(row["msg_size"]))
    item.elapsed_time = float(row["_elapsed_time"])
    if not item.is_epoch_end():
        assert (item.algbw, item.busbw) == (float(row["algbw"]), float(row["busbw"])), row
    log.add_comm_log(item)
log.analyze_time()
"""


@pytest.mark.skipif(not _AICB, reason="no checkout of AICB: set COMMTRACE_AICB")
def test_aicbs_own_analyser_finds_the_same_times(tmp_path: Path) -> None:
    log = log_of_rank(job(), 0)
    write_log(log, tmp_path / "log.csv")

    command = [sys.executable, "-c", _ANALYSER, _AICB, str(tmp_path / "log.csv")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    assert printed.strip().splitlines()[-1].split() == [f"{time:.2f}" for time in IterationTimes.of(log)]


def test_the_reference_log_has_the_same_columns() -> None:
    with reference_data("aicb", "measured_A100_head.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
