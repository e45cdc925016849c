"""``commtrace import KIND FILES… -o RUN``: makes a run from a recording of another program."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from commtrace.errors import ConfigurationError
from commtrace.interchange.rows import Imported
from commtrace.recording.installation import own_command
from commtrace.trace.inputs import printable_lines


class FileKind(str, Enum):
    """The kind of files."""

    KINETO = "kineto"
    WHATIF = "whatif"
    FLIGHT_RECORDER = "flight-recorder"
    INSPECTOR = "inspector"
    WORKERLOG = "workerlog"
    AICB_CSV = "aicb-csv"


class Steps(str, Enum):
    """The definition of a step in a trace."""

    WHOLE = "whole"
    PROFILER = "profiler"


def import_(
    kind: Annotated[FileKind, typer.Argument(help="The kind of the files; see below.", show_default=False)],
    files: Annotated[
        list[Path], typer.Argument(help="One file per rank; whatif, aicb-csv: one in all.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory of the new run.", show_default=False)],
    step_source: Annotated[
        Steps, typer.Option(help="kineto: whole (a file is one step) or profiler (its ProfilerSteps are the steps).")
    ] = Steps.WHOLE,
    communication_pattern: Annotated[
        str,
        typer.Option(
            metavar="REGEX",
            help="kineto: finds further communication kernels by name, besides those named nccl.",
            show_default=False,
        ),
    ] = "",
    ranks_per_host: Annotated[
        int,
        typer.Option(
            min=0,
            help="kineto, flight-recorder: number of ranks that share a host, and so a clock. Default: the devices in "
            "a trace, else 8.",
            show_default=False,
        ),
    ] = 0,
    meta: Annotated[
        Path | None, typer.Option(help="whatif: file with the sizes of the job.", show_default=False)
    ] = None,
) -> None:
    """Make a run from a recording of another program. Every reading command accepts it.

    kineto: the JSON that torch.profiler writes, plain or gzip, or torch_npu's trace_view.json. whatif: a Parquet trace
    of the what-if study of stragglers. flight-recorder: the dumps of torch's flight recorder. inspector: the JSON lines
    of NCCL Inspector or RCCL Inspector, or their folder. workerlog: the logs of Paddle's executor, or their folder.
    aicb-csv: the log of an AICB benchmark.
    """
    for path in files:
        if path.is_dir() and kind in _FILES:
            raise ConfigurationError(_is_directory(kind, path, output))
    with _progress() as show:
        if kind is FileKind.KINETO:
            by_profiler = step_source is Steps.PROFILER
            imported = _import_kineto(files, output, communication_pattern, by_profiler, ranks_per_host, show)
        else:
            imported = _import(kind, files, output, ranks_per_host, meta, show)
    for note in imported.notes:
        typer.echo(f"Note: {printable_lines(note)}", err=True)
    typer.echo(
        f"{output}: {imported.ranks} rank{'s' * (imported.ranks != 1)}, {imported.num_spans} spans. "
        f"Next: {own_command()} summary {output}"
    )


class _Takes(NamedTuple):
    """The files of a kind, of which a directory is none."""

    patterns: tuple[str, ...]
    words: str


_FILES: Final = {
    FileKind.KINETO: _Takes(("*.json.gz", "*.json"), "the traces that torch.profiler wrote, one per rank"),
    FileKind.FLIGHT_RECORDER: _Takes(("*[0-9]",), "the dumps of the flight recorder, one per rank"),
    FileKind.WHATIF: _Takes(("*.parquet",), "the one Parquet file of a job"),
    FileKind.AICB_CSV: _Takes(("*.csv",), "the one log of a benchmark"),
}


def _is_directory(kind: FileKind, path: Path, output: Path) -> str:
    """Return what to give instead of a directory: a command with the files in it, if it holds some."""
    patterns, words = _FILES[kind]
    found = {pattern: sorted(file for file in path.glob(pattern) if file.is_file()) for pattern in patterns}
    pattern = max(patterns, key=lambda pattern: len(found[pattern]))
    message = f"{path} is a directory. Give {words}"
    if not found[pattern]:
        return f"{message}; it holds no {' or '.join(patterns)}."
    takes_one = kind in (FileKind.WHATIF, FileKind.AICB_CSV)
    last = found[pattern][0].name if takes_one else pattern
    given = f"{shlex.quote(str(path))}/{shlex.quote(last) if takes_one else last}"
    return f"{message}:\n  {own_command()} import {kind.value} {given} -o {shlex.quote(str(output))}"


@contextmanager
def _progress() -> Iterator[Callable[[Path], None]]:
    """Yield a function that shows each file's name before it is read, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda path: None
        return
    from rich.console import Console  # a good part of the start of a small import

    with Console(stderr=True, highlight=False).status("Importing") as status:
        yield lambda path: status.update(f"Reading {path}")


def _import_kineto(
    files: Sequence[Path],
    output: Path,
    pattern: str,
    steps_of_profiler: bool,
    ranks_per_host: int,
    on_file: Callable[[Path], None],
) -> Imported:
    from commtrace.interchange.traces.kineto import KinetoOptions, import_kineto

    options = KinetoOptions(pattern or None, steps_of_profiler, ranks_per_host)
    return import_kineto(files, output, options, on_file=on_file)


def _import(
    kind: FileKind,
    files: Sequence[Path],
    output: Path,
    ranks_per_host: int,
    meta: Path | None,
    on_file: Callable[[Path], None],
) -> Imported:
    # Imported where they are needed: the modules of all formats would double the time to import a small trace.
    if kind is FileKind.FLIGHT_RECORDER:
        from commtrace.interchange.dumps.flight_recorder import import_flight_recorder

        return import_flight_recorder(files, output, ranks_per_host=ranks_per_host, on_file=on_file)
    if kind is FileKind.INSPECTOR:
        from commtrace.interchange.dumps.inspector import import_inspector

        return import_inspector(files, output, on_file=on_file)
    if kind is FileKind.WORKERLOG:
        from commtrace.interchange.workerlog import import_workerlog

        return import_workerlog(files, output, on_file=on_file)
    if len(files) != 1:
        what = "Parquet file of a job" if kind is FileKind.WHATIF else "log of a benchmark"
        raise ConfigurationError(f"{kind.value} takes the one {what}, and {len(files)} were given.")
    if kind is FileKind.AICB_CSV:
        from commtrace.interchange.simulators.aicb_csv import import_aicb_csv

        return import_aicb_csv(files[0], output, on_file=on_file)
    from commtrace.interchange.whatif_study.files import import_whatif

    return import_whatif(files[0], output, meta=meta, on_file=on_file)
