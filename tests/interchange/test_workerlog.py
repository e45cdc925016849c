from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.analysis.summary import summarise
from commtrace.cli.main import app
from commtrace.errors import ImportFileError
from commtrace.interchange.workerlog import import_workerlog
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.interchange.worker_logs import BASE_MS, job, write_log
from tests.reference import reference_data


def test_a_gap_before_a_job_is_the_wait_for_its_neighbour(tmp_path: Path) -> None:
    """Stage 1 waits 10 ms for the forward of stage 0, of which 1 ms is transfer; then stage 0 waits."""
    files = [
        write_log(tmp_path / "workerlog.0", job("lr", 0, 0, 1), job("forward", 0, 1, 10), job("backward", 0, 33, 40)),
        write_log(tmp_path / "workerlog.1", job("lr", 0, 0, 1), job("forward", 0, 11, 20), job("backward", 0, 20, 32)),
    ]

    import_workerlog(files, tmp_path / "run")

    first, second = summarise(tmp_path / "run").ranks
    assert (first.part("bubble"), first.part("exposed")) == (22_000_000, 1_000_000)
    assert (second.part("bubble"), second.part("exposed")) == (9_000_000, 1_000_000)
    assert (first.wall_ns, first.part("compute"), first.part("other")) == (40_000_000, 17_000_000, 0)


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    line = job("forward", 0, 0, 300).replace(f"{BASE_MS}.000000", "1697793307213.760986")

    import_workerlog([write_log(tmp_path / "workerlog.0", line)], tmp_path / "run")

    assert load_run(tmp_path / "run").ranks[0].spans.start[0] == 1_697_793_307_213_760_986


@pytest.mark.parametrize(
    "damaged",
    [
        job("forward", 1, 20, 30)[:-30],  # cut off while it was written
        job("forward", 1, 20, 30)[:-12] + "\n",  # cut inside of its last number: ends in the past
        job("forward", 1, 20, 30).replace(f"{BASE_MS + 20:.6f}", "nan"),
        job("forward", 1, 20, 30).replace(f"{BASE_MS + 30:.6f}", "1.2.3"),
        job("forward", 1, 30, 20),
    ],
)
def test_lines_that_cannot_be_read_are_left_out_and_reported(tmp_path: Path, damaged: str) -> None:
    log = write_log(tmp_path / "workerlog.0", job("forward", 0, 0, 10), damaged)

    import_workerlog([log], tmp_path / "run")

    run = load_run(tmp_path / "run")
    assert run.ranks[0].spans.microbatch[run.ranks[0].spans.kind == schema.FORWARD].tolist() == [0]
    assert any(
        "1 damaged `Profiler Info: Job` lines of workerlog.0 were left out" in problem for problem in run.problems
    )


def test_a_log_of_damaged_lines_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="none of its 1 `Profiler Info: Job` lines can be read"):
        import_workerlog([write_log(tmp_path / "workerlog.0", job("forward", 1, 30, 20))], tmp_path / "run")


def test_a_step_is_over_when_a_job_comes_again(tmp_path: Path) -> None:
    jobs = [
        one
        for begin in (0, 100)
        for one in (job("forward", 0, begin, begin + 5), job("optimizer", 0, begin + 8, begin + 9))
    ]

    import_workerlog([write_log(tmp_path / "workerlog.0", *jobs)], tmp_path / "run")

    partition = analyse(tmp_path / "run").partition
    assert partition.step.tolist() == [3, 4]
    assert partition.wall_ns.tolist() == [100_000_000, 9_000_000]


def test_messages_go_around_between_chunks(tmp_path: Path) -> None:
    """Two stages, two chunks: 0:0 → 1:0 → 0:1 → 1:1, and back."""
    files = [
        write_log(
            tmp_path / "workerlog.0", job("forward0", 0, 0, 1), job("forward1", 0, 4, 5), job("backward1", 0, 8, 9)
        ),
        write_log(
            tmp_path / "workerlog.1", job("forward0", 0, 2, 3), job("forward1", 0, 6, 7), job("backward1", 0, 7, 8)
        ),
    ]

    import_workerlog(files, tmp_path / "run")

    run = load_run(tmp_path / "run")
    received = {
        rank: [
            (run.names[trace.spans.name[row]], int(trace.spans.peer[row]), int(trace.spans.chunk[row]))
            for row in range(len(trace.spans))
            if trace.spans.kind[row] == schema.P2P and run.names[trace.spans.name[row]] == "recv"
        ]
        for rank, trace in run.ranks.items()
    }
    assert received == {0: [("recv", 1, 1), ("recv", 1, 1)], 1: [("recv", 0, 0), ("recv", 0, 1)]}
    assert run.ranks[0].parallel == {"pp": 2, "vpp": 2}
    assert all(row.unmatched == 0 for row in summarise(tmp_path / "run").communication)


def test_machines_come_one_after_the_other(tmp_path: Path) -> None:
    for machine in (0, 1):
        for local in (0, 10, 2):
            write_log(tmp_path / "logs" / f"machine{machine}" / f"workerlog.{local}", job("forward", 0, 0, 1))

    import_workerlog([tmp_path / "logs"], tmp_path / "run")

    places = [(trace.metadata.node, trace.metadata.local_rank) for trace in load_run(tmp_path / "run").ranks.values()]
    assert places == [(f"machine{machine}", local) for machine in (0, 1) for local in (0, 2, 10)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("workerlog.0", "nothing of the kind\n", "no `Profiler Info: Job` lines"),
        ("train.log", job("forward", 0, 0, 1), "not named workerlog.N"),
        ("folder/other.txt", "", "holds no workerlog.0"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_words(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)

    with pytest.raises(ImportFileError, match=message):
        import_workerlog([path if path.suffix != ".txt" else path.parent], tmp_path / "run")


def test_a_pipeline_is_found_in_the_logs(tmp_path: Path) -> None:
    """4 stages, 6 microbatches; a forward takes 4 ms, a backward 8 ms, a message 0.6 ms."""
    result = CliRunner().invoke(
        app, ["import", "workerlog", str(reference_data("paddle", "single")), "-o", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.output

    summary = summarise(tmp_path / "run")

    pipeline = summary.pipeline
    assert pipeline
    assert (pipeline.schedule, pipeline.stages, pipeline.microbatches) == ("1f1b", 4, 6)
    (recv,) = [row for row in summary.communication if row.operation == "recv"]
    assert recv.unmatched == 0
    assert recv.duration_p50_ns == pytest.approx(600_000, abs=1_000)
    for rank in summary.ranks:
        assert rank.part("compute") == pytest.approx(6 * 12e6 + 3e6, abs=1e6)


def test_a_sparse_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    with path.open("wb") as file:
        file.truncate(50 << 30)

    with pytest.raises(ImportFileError, match="sparse or damaged"):
        import_workerlog([path], tmp_path / "run")
