"""The calls of users: start, step, span, stop. Whatever they pass, training goes on and is recorded if possible."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

import commtrace
from commtrace.capture import instrumentation
from commtrace.capture.device import device_watch
from commtrace.config import forwardable
from commtrace.recording import identity, session
from commtrace.trace import schema
from commtrace.trace.files.reader import load_earlier_attempts, load_run
from tests.capture.recording import cuda_clock, fake_backend
from tests.capture.simulated_cuda import SimulatedCuda
from tests.e2e.launch import run


def test_step_numbers_of_numpy_are_in_the_window_and_other_things_cost_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: Any = "7"
    commtrace.start(commtrace.Config(dir=str(tmp_path), steps="3:9"))
    try:
        number: Any = np.int64(3)
        with commtrace.step(number):
            pass
        with commtrace.step(wrong):
            pass
        with commtrace.step(8):
            pass
    finally:
        commtrace.stop()

    spans = load_run(tmp_path).ranks[0].spans
    assert spans.step[spans.kind == schema.STEP].tolist() == [3, 8]
    assert "commtrace.step, commtrace.span and commtrace.count" in caplog.text


def test_variables_that_cannot_be_used_are_logged_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMTRACE_DIR", str(tmp_path))
    monkeypatch.setenv("COMMTRACE_BUFFER_SPANS", "0")
    with caplog.at_level(logging.ERROR):
        commtrace.start()
        commtrace.stop()

    assert "commtrace is off in this process: COMMTRACE_BUFFER_SPANS='0': write a whole number" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_counts_of_the_script_are_in_the_trace_with_their_step(tmp_path: Path) -> None:
    wrong: Any = "many"
    commtrace.start(commtrace.Config(dir=str(tmp_path)))
    try:
        with commtrace.step(3):
            commtrace.count(tokens=4096, samples=2)
            commtrace.count(tokens=wrong)
    finally:
        commtrace.stop()

    table = pa.concat_tables(
        pa.ipc.open_stream(path).read_all().replace_schema_metadata() for path in sorted(tmp_path.glob("*/*.arrows"))
    )
    counts = [row for row in table.unify_dictionaries().to_pylist() if row["name"] == "count"]
    assert [(row["step"], json.loads(row["detail"])) for row in counts] == [(3, {"tokens": 4096.0, "samples": 2.0})]


def test_the_device_is_reported_once_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimulatedCuda(3)
    clock = cuda_clock(cuda)
    monkeypatch.setattr(instrumentation, "_device_clock", lambda native: clock)
    monkeypatch.setattr(identity, "device", lambda number=None: (f"GPU {number}", "u"))
    marks = instrumentation.Instrumentation(commtrace.Config(dir=str(tmp_path)))._marks.since_last_pass
    assert "topology" not in dict(marks())
    with cuda.device(3):
        clock.mark()
    told: dict[str, Any] = dict(marks())
    assert told["topology"]["device"] == {"name": "GPU 3", "uuid": "u"}
    assert "topology" not in dict(marks())


def test_readings_of_the_device_are_reported_once_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        NVMLError=LookupError, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, NVML_VOLATILE_ECC=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_NVLINK_MAX_LINKS=0,
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetSerial=lambda device: device,
        nvmlDeviceGetClockInfo=lambda device, which: 1095,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(device_watch, "READ_SECONDS", 0.001)
    cuda = SimulatedCuda(3)
    clock = cuda_clock(cuda)
    monkeypatch.setattr(instrumentation, "_device_clock", lambda native: clock)
    monkeypatch.setattr(identity, "device", lambda number=None: (f"GPU {number}", "u"))
    recording = instrumentation.Instrumentation(commtrace.Config(dir=str(tmp_path)))
    with cuda.device(3):
        clock.mark()
    latest: dict[str, Any] = {}
    while "device_state" not in latest:
        latest = dict(recording._marks.since_last_pass())
    recording._device_watch.stop()

    assert latest["device_state"].pop("at_ns") > 0
    assert latest["device_state"] == {"clock_mhz": 1095, "serial": "GPU-u"}


def test_rank_0_says_where_it_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    _record_one_step(tmp_path)
    assert f"commtrace summary {tmp_path}" in capsys.readouterr().err


def test_below_commtrace_run_nothing_is_said_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("COMMTRACE_NOTES", str(notes))
    _record_one_step(tmp_path / "run")
    assert "recording to" not in capsys.readouterr().err
    assert notes.read_text() == f"{tmp_path}/run/rank-00000\n"


def test_options_of_commtrace_run_that_did_not_arrive_are_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import commtrace._inject

    monkeypatch.setenv("PYTHONPATH", str(Path(commtrace._inject.__file__).parent))
    _record_one_step(tmp_path)
    assert "Let it forward PYTHON_COMMTRACE_VARIABLES as well" in caplog.text


def test_options_that_came_with_pythons_variables_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_COMMTRACE_VARIABLES", forwardable({"COMMTRACE_DIR": str(tmp_path / "{run_id}")}))
    monkeypatch.setenv("COMMTRACE_RUN_ID", "nearer")
    commtrace.start()
    with commtrace.step():
        pass
    commtrace.stop()
    assert load_run(tmp_path / "nearer").ranks[0].metadata.run_id == "nearer"


def _record_one_step(directory: Path) -> None:
    commtrace.start(commtrace.Config(dir=str(directory)))
    with commtrace.step(0):
        pass
    commtrace.stop()


def test_a_signal_that_stops_while_the_recording_starts_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vars(dist.ProcessGroup)["allreduce"]
    start = instrumentation.Instrumentation.start

    def interrupted(starting: Any) -> None:
        start(starting)
        signal.raise_signal(signal.SIGUSR1)
        assert vars(dist.ProcessGroup)["allreduce"] is not before, "it stops when it has started"

    earlier = signal.signal(signal.SIGUSR1, lambda *_: commtrace.stop())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(instrumentation.Instrumentation, "start", interrupted)
            commtrace.start(commtrace.Config(dir=str(tmp_path)))
        assert session._current is None
        assert vars(dist.ProcessGroup)["allreduce"] is before
        commtrace.start(commtrace.Config(dir=str(tmp_path)))
        assert session._current is not None, "it can be started again"
    finally:
        commtrace.stop()
        signal.signal(signal.SIGUSR1, earlier)


ENDS_WHILE_PYTHON_ENDS = """
import atexit
import commtrace
from commtrace.recording import session

commtrace.start()
atexit.register(session._end_before_others)
with commtrace.step(0):
    pass
"""


def test_a_recording_that_is_to_end_first_ends_also_where_python_is_ending_already(tmp_path: Path) -> None:
    """What is registered meanwhile is not called any more, and an exporter may find a provider as late as that."""
    completed = run([sys.executable, "-c", ENDS_WHILE_PYTHON_ENDS], {"COMMTRACE_DIR": str(tmp_path)})
    assert completed.returncode == 0, completed.stdout
    assert load_run(tmp_path).ranks[0].closed


def test_starting_again_in_the_same_directory_is_reported_and_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for numbers in ((0, 1), (10, 11)):
        commtrace.start(commtrace.Config(dir=str(tmp_path), run_id="twice"))
        for number in numbers:
            with commtrace.step(number):
                pass
        commtrace.stop()

    run = load_run(tmp_path)
    spans = run.ranks[0].spans
    assert spans.step[spans.kind == schema.STEP].tolist() == [10, 11]
    assert run.ranks[0].closed
    assert run.problems == (
        "1 segment of other runs or attempts in the same directory was left out; shown is run twice, attempt 1.",
    )
    assert caplog.text.count("holds a recording already") == 1


def test_a_forked_child_asks_nothing_of_its_parents_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrumentation, "_is_initialized", lambda: True)
    recording = instrumentation.Instrumentation(commtrace.Config(dir=str(tmp_path)))
    asked: list[float] = []
    monkeypatch.setattr(recording._identity, "settled", lambda seconds, place: asked.append(seconds))
    recording._identify_before_the_end()
    recording.abandon_after_fork()
    recording._identify_before_the_end()

    assert asked == [instrumentation.NAME_SECONDS]


def train_in_worlds(*places: tuple[int, int]) -> None:
    """Take two steps in each world."""
    for rank, world_size in places:
        with fake_backend(rank, world_size):
            for _ in range(2):
                with commtrace.step():
                    dist.all_reduce(torch.ones(4))


def recorded_worlds(directory: Path) -> list[tuple[int, int, int, list[int]]]:
    """Return attempt, world size, rank and steps of each world of this process."""
    newest = load_run(directory)
    found = []
    for run_ in (*load_earlier_attempts(newest), newest):
        (trace,) = run_.ranks.values()
        assert trace.closed
        steps = trace.spans.step[trace.spans.kind == schema.STEP].tolist()
        found.append((trace.metadata.attempt, trace.metadata.world_size, trace.metadata.rank, steps))
    return found


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_process_that_joins_another_world_records_on_with_its_rank_there(engine: str, tmp_path: Path) -> None:
    before = dict(vars(dist.distributed_c10d))
    commtrace.start(commtrace.Config(dir=str(tmp_path), run_id="job", engine=engine))
    try:
        train_in_worlds((1, 4), (0, 2), (0, 2), (3, 4))
    finally:
        commtrace.stop()

    assert recorded_worlds(tmp_path) == [(0, 4, 1, [0, 1]), (1, 2, 0, [2, 3, 4, 5]), (2, 4, 3, [6, 7])]
    after = dict(vars(dist.distributed_c10d))
    assert {name for name in before if callable(before[name]) and after[name] is not before[name]} == set()


def test_a_recording_that_cannot_go_on_in_another_world_leaves_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = vars(dist.distributed_c10d)["_update_default_pg"]
    commtrace.start(commtrace.Config(dir=str(tmp_path), run_id="job"))

    def fail(_: instrumentation.Instrumentation) -> None:
        raise RuntimeError("no more threads")

    try:
        with fake_backend(1, 4):
            monkeypatch.setattr(instrumentation.Instrumentation, "start", fail)
        train_in_worlds((0, 2), (1, 2))
    finally:
        commtrace.stop()

    assert caplog.text.count("commtrace could not go on in another world, and is off in this process") == 1
    assert vars(dist.distributed_c10d)["_update_default_pg"] is before
    assert [world[:3] for world in recorded_worlds(tmp_path)] == [(0, 4, 1)]


def test_a_failure_to_tell_worlds_apart_leaves_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise OSError("broken")

    monkeypatch.setattr(identity.Identity, "goes_on_at", fail)
    commtrace.start(commtrace.Config(dir=str(tmp_path), run_id="job"))
    try:
        train_in_worlds((1, 4), (0, 2))
    finally:
        commtrace.stop()

    assert "process group creation is switched off for the rest of this run: OSError: broken" in caplog.text
    assert [world[0] for world in recorded_worlds(tmp_path)] == [0]


def test_a_variable_that_changes_after_the_options_were_read_is_said_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commtrace.start(commtrace.Config(dir=str(tmp_path)))
    monkeypatch.setenv("COMMTRACE_STEPS", "5:7")
    monkeypatch.setenv("COMMTRACE_RUN_ID", "named-later")
    try:
        with commtrace.step():
            pass
    finally:
        commtrace.stop()

    assert "commtrace: COMMTRACE_STEPS changed after the options had been read, and has no effect." in caplog.text
    assert "Ray" not in caplog.text
