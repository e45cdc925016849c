"""Data loading, clipping, checkpoints and garbage collections: each once, the outermost where they are nested."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import load as load_bound_early
from torch import save as save_bound_early
from torch.distributed.checkpoint import save as distributed_save_bound_early
from torch.nn.utils import clip_grad_norm_ as clip_bound_early
from torch.utils.data import DataLoader, Dataset

from commtrace.capture.hooks import keep_compiler_out
from commtrace.capture.model import phases as phases_module
from commtrace.capture.model.phases import SHORTEST_GARBAGE_NS, GarbageCollections, PhaseCapture
from commtrace.trace import schema
from tests.capture.recording import Recording, fake_backend


@pytest.fixture
def phases(recording: Recording) -> Iterator[Recording]:
    capture = PhaseCapture(recording.tracer)
    capture.install()
    recording.tracer.begin_step(3)
    yield recording
    capture.uninstall()


def recorded_phases(recording: Recording) -> list[tuple[str, str]]:
    return [(schema.KINDS[row.kind], row.name) for row in recording.rows() if row.kind != schema.STEP]


class Samples(Dataset[Any]):
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.load(self.folder / "sample.pt") if self.folder else torch.tensor(index)


def parameter() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 4.0)
    return weight


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_next_of_a_loader_is_a_wait_for_data(phases: Recording, num_workers: int) -> None:
    batches = [batch.tolist() for batch in DataLoader(Samples(), batch_size=2, num_workers=num_workers)]

    assert batches == [[0, 1], [2, 3]]
    # The last one finds that there are no more, which takes time too: workers are shut down.
    assert recorded_phases(phases) == [("data", "start of loader"), *[("data", "next batch")] * 3]
    assert {(row.step, row.lane) for row in phases.rows()} == {(3, schema.HOST)}


def test_a_loader_in_a_loader_and_a_sample_from_a_file_are_one_wait(phases: Recording, tmp_path: Path) -> None:
    torch.save(torch.ones(2), io.BytesIO())
    with open(tmp_path / "sample.pt", "wb") as file:
        torch.save(torch.ones(2), file)
    loader = iter(DataLoader(DataLoader(Samples(tmp_path)).dataset, batch_size=4))
    next(loader)

    assert recorded_phases(phases) == [
        ("checkpoint", "torch.save"),
        ("data", "start of loader"),
        ("data", "next batch"),
    ]


def test_a_thread_that_reads_ahead_stops_no_training(phases: Recording) -> None:
    reader = threading.Thread(target=lambda: list(DataLoader(Samples())))
    reader.start()
    reader.join()

    assert recorded_phases(phases) == []


def test_files_are_checkpoints_and_memory_is_not(phases: Recording, tmp_path: Path) -> None:
    save_bound_early({"weight": torch.ones(2)}, tmp_path / "a.pt")
    save_bound_early({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert load_bound_early(tmp_path / "a.pt")["weight"].tolist() == [1.0, 1.0]
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)
    buffer.seek(0)
    torch.load(buffer)

    assert recorded_phases(phases) == [("checkpoint", "torch.save")] * 2 + [("checkpoint", "torch.load")]


def test_a_checkpoint_that_cannot_be_written_is_closed(phases: Recording, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.save(torch.ones(2), tmp_path / "no such folder" / "a.pt")
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "no such file")
    with pytest.raises((AttributeError, TypeError)):
        torch.save(lambda: None, tmp_path / "a.pt")

    assert recorded_phases(phases) == [
        ("checkpoint", "torch.save"),
        ("checkpoint", "torch.load"),
        ("checkpoint", "torch.save"),
    ]
    assert phases.tracer.open_waits == 0


def test_collectives_of_objects_are_no_checkpoints(recording: Recording) -> None:
    capture = PhaseCapture(recording.tracer)
    capture.install()
    with fake_backend(world_size=1):
        torch.distributed.broadcast_object_list([{"a": 1}], src=0)
    capture.uninstall()

    assert recorded_phases(recording) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is deprecated:UserWarning")
def test_distributed_checkpoints_are_one_span_with_all_files(phases: Recording, tmp_path: Path) -> None:
    state = {"weight": torch.ones(4)}
    distributed_save_bound_early(state, checkpoint_id=tmp_path / "a")
    dcp.load(state, checkpoint_id=tmp_path / "a")

    assert recorded_phases(phases) == [
        ("checkpoint", "distributed.checkpoint.save"),
        ("checkpoint", "distributed.checkpoint.load"),
    ]


def test_the_step_ends_before_megatrons_loop_saves(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing, loop = ModuleType("megatron.training.checkpointing"), ModuleType("megatron.training.training")

    def save_checkpoint() -> None:
        torch.save(torch.ones(2), tmp_path / "a.pt")

    for module in (checkpointing, loop):
        monkeypatch.setattr(module, "save_checkpoint", save_checkpoint, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    capture = PhaseCapture(recording.tracer)
    capture.install()
    recording.tracer.begin_step(3)
    recording.tracer.leave(recording.tracer.enter(schema.OPTIMIZER, "Adam"))
    loop.save_checkpoint()
    recording.tracer.begin_step(4)
    recording.tracer.end_step()
    capture.uninstall()

    rows = {(schema.KINDS[row.kind], row.name, row.step): row for row in recording.rows()}
    assert list(rows) == [
        ("optimizer", "Adam", 3),
        ("step", "step", 3),
        ("checkpoint", "megatron.save", schema.NOT_APPLICABLE),
        ("between", "between steps", 4),
        ("step", "step", 4),
    ]
    assert rows["step", "step", 3].end <= rows["checkpoint", "megatron.save", schema.NOT_APPLICABLE].start


def test_clipping_is_the_optimizers_work(phases: Recording) -> None:
    weight = parameter()
    assert clip_bound_early([weight], 1.0).item() == pytest.approx(32**0.5)
    torch.nn.utils.clip_grad_value_([weight], 0.1)
    assert weight.grad is not None
    torch.nn.utils.get_total_norm([weight.grad])
    phase = phases.tracer.enter(schema.OPTIMIZER, "Wrapping")
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    phases.tracer.leave(phase)

    assert recorded_phases(phases) == [
        ("optimizer", "clip_grad_norm"),
        ("optimizer", "clip_grad_value"),
        ("optimizer", "clip_grad_norm"),
        ("phase", "clip_grad_norm"),
        ("optimizer", "Wrapping"),
    ]


def test_every_original_comes_back(recording: Recording, tmp_path: Path) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    before = [cell.cell_contents for cell in clip.__closure__ or ()]
    owners: list[tuple[Any, str]] = [
        (torch.serialization, "_open_zipfile_writer"),
        (torch.serialization, "_open_file_like"),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
        (DataLoader, "__iter__"),
    ]
    originals = [vars(owner)[name] for owner, name in owners]
    capture = PhaseCapture(recording.tracer)
    capture.install()
    assert all(vars(owner)[name] is not original for (owner, name), original in zip(owners, originals, strict=True))
    assert [cell.cell_contents for cell in clip.__closure__ or ()] != before

    capture.uninstall()

    assert [vars(owner)[name] for owner, name in owners] == originals
    assert [cell.cell_contents for cell in clip.__closure__ or ()] == before
    torch.save(torch.ones(2), tmp_path / "a.pt")
    assert recorded_phases(recording) == []


def test_a_failure_of_ours_does_not_stop_training(
    phases: Recording, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(phases.tracer, "enter", fail)
    torch.save(torch.ones(2), tmp_path / "a.pt")
    weight = parameter()
    clip_bound_early([weight], 1.0)

    assert torch.load(tmp_path / "a.pt").tolist() == [1.0, 1.0]
    assert len(phases.warnings()) == 1


def test_nothing_is_imported_for_it() -> None:
    source = (
        "import sys\n"
        "from tests.capture.recording import Recording\n"
        "from commtrace.capture.model.phases import PhaseCapture\n"
        "before = set(sys.modules)\n"
        "PhaseCapture(Recording().tracer).install()\n"
        "new = set(sys.modules) - before\n"
        "print({'torch.distributed.checkpoint', 'deepspeed', 'megatron', 'megatron.core'} & new)"
    )
    completed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)

    assert completed.stdout == "set()\n", completed.stderr


@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch cannot compile clipping into one graph")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo's own
def test_clipping_is_part_of_a_graph_that_may_not_break(phases: Recording) -> None:
    uninstall = keep_compiler_out(phases.tracer)
    layer = torch.nn.Linear(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    try:
        norm = torch.compile(lambda: clip_bound_early(layer.parameters(), 1.0), backend="eager", fullgraph=True)()
        assert norm > 1.0
        assert recorded_phases(phases) == []
        clip_bound_early(layer.parameters(), 1.0)
        assert recorded_phases(phases) == [("optimizer", "clip_grad_norm")]
    finally:
        torch._dynamo.reset()
        uninstall()


def test_a_file_opened_by_torch_keeps_its_attributes(phases: Recording, tmp_path: Path) -> None:
    save_bound_early(1, tmp_path / "saved")
    opened = torch.serialization._open_file_like(tmp_path / "saved", "rb")
    with opened as file:
        assert opened.file_like is file


class Time:
    """Each reading is ``step_ns`` later than the one before."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.step_ns = 0

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(phases_module, "now_ns", time)
    return time


@pytest.fixture
def collecting(recording: Recording, time: Time) -> Iterator[Recording]:
    gc.disable()
    collections = GarbageCollections(recording.tracer)
    collections.install()
    yield recording
    collections.uninstall()
    gc.enable()


def test_a_long_collection_is_a_span(collecting: Recording, time: Time) -> None:
    collecting.tracer.begin_step(3)
    time.step_ns = SHORTEST_GARBAGE_NS
    gc.collect(1)

    (row,) = collecting.rows()
    assert (row.kind, row.name, row.lane, row.step) == (schema.GC, "generation 1", schema.HOST, 3)
    assert row.end - row.start == SHORTEST_GARBAGE_NS
    assert row.timing == schema.HOST_TIMING


def test_a_short_one_is_not(collecting: Recording, time: Time) -> None:
    time.step_ns = SHORTEST_GARBAGE_NS - 1
    gc.collect()

    assert collecting.rows() == []


def test_outside_of_steps_and_of_the_window_there_is_none(collecting: Recording, time: Time) -> None:
    time.step_ns = SHORTEST_GARBAGE_NS
    gc.collect()
    collecting.tracer.begin_step()
    collecting.tracer.recording = False
    gc.collect()

    assert collecting.rows() == []


def test_it_listens_once_and_stops(recording: Recording) -> None:
    before = list(gc.callbacks)
    collections = GarbageCollections(recording.tracer)
    collections.install()
    collections.install()
    assert len(gc.callbacks) == len(before) + 1

    collections.uninstall()
    collections.uninstall()

    assert gc.callbacks == before


def test_a_failure_of_ours_does_not_stop_the_collector(
    collecting: Recording, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ZeroDivisionError

    collecting.tracer.begin_step()
    monkeypatch.setattr(collecting.tracer, "append", fail)
    time.step_ns = SHORTEST_GARBAGE_NS

    gc.collect()

    assert len(collecting.warnings()) == 1
