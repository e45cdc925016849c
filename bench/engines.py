"""The engines that record here, for benches and for tests on a GPU: which there are, and which was at work in a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

import commtrace
from commtrace import _native
from commtrace.recording.options import AUTO, NATIVE, PYTHON

OFF, PROFILER = "off", "torch.profiler"


def engines() -> list[str]:
    """Return the engines that can record here; Python's always can."""
    return [PYTHON] if why_not_native() else [NATIVE, PYTHON]


def why_not_native() -> str:
    """Return why the native engine cannot be had here, or nothing."""
    return _native.load()[1]


@contextmanager
def recording(variant: str, directory: str | Path) -> Iterator[None]:
    """Record what runs inside as the variant says, and make sure that it was so.

    Args:
        variant: ``off``, an engine, ``auto``, an engine with spans of modules (``native+modules``), or
            ``torch.profiler`` (CPU, and CUDA where there is a GPU; nothing is exported).
    """
    engine, _, modules = variant.partition("+")
    if variant == OFF:
        yield
    elif variant == PROFILER:
        with torch.profiler.profile():
            yield
    else:
        # Depth 3 of a model in DDP: the children of its layers.
        depth = "depth=3" if modules else ""
        commtrace.start(commtrace.Config(dir=str(directory), engine=engine, modules=depth))
        yield
        commtrace.stop()
        check_engine(directory, engine)


def environment(variant: str, directory: str | Path) -> dict[str, str]:
    """Return the variables with which a job records with an engine into a directory, or is ``off``."""
    if variant == OFF:
        return {"COMMTRACE_ENABLED": "0"}
    return {"COMMTRACE_DIR": str(directory), "COMMTRACE_ENGINE": variant}


def recorded_rows(run_directory: str | Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return all rows of a rank. Read by Arrow alone: what was recorded is looked at, not the reader."""
    folder = Path(run_directory) / f"rank-{rank:05d}"
    segments = sorted(folder.glob("spans-*.arrows"))
    assert segments, f"nothing was recorded in {folder}"
    rows: list[dict[str, Any]] = []
    for segment in segments:
        with pa.ipc.open_stream(pa.OSFile(str(segment))) as stream:
            rows += stream.read_all().to_pylist()
    return rows


def details(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return what the marks of a name say."""
    return [json.loads(row["detail"]) for row in rows if row["kind"] == "mark" and row["name"] == name]


def engine_at_work(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the name of the engine that recorded these rows, and why it was not the native one, if it says so."""
    for topology in details(rows, "topology"):
        if "engine" in topology:
            return topology["engine"]["name"], topology["engine"]["reason"]
    return PYTHON, ""


def faults_of_recording(rows: Sequence[dict[str, Any]], engine: str) -> list[str]:
    """Return what is wrong with the rows of a rank: another engine recorded, spans were dropped, or a part failed."""
    name, reason = engine_at_work(rows)
    faults = [] if name == engine else [f"the {name} engine recorded: {reason}"]
    faults += [f"{mark}: {json.dumps(found)}" for mark in ("dropped", "problem") if (found := details(rows, mark))]
    return faults


def check_engine(run_directory: str | Path, engine: str) -> None:
    """Make sure that a figure is of the engine that it is ascribed to.

    Raises:
        SystemExit: another one recorded.
    """
    name, reason = engine_at_work(recorded_rows(run_directory))
    if engine not in (name, AUTO):
        raise SystemExit(f"the {engine} engine was asked for, and the {name} one recorded: {reason}")
