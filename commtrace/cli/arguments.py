"""Arguments and options that several commands share."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.analysis.windows.run import ALONE, Workers
from commtrace.errors import ConfigurationError, MissingExtraError, RunNotFoundError
from commtrace.trace.byte_sizes import parse_bytes
from commtrace.trace.files.locate import NEWEST_RUN, RUNS, find_run_directory
from commtrace.trace.inputs import printable

DEFAULT_RUNS: Final = [NEWEST_RUN]

RunArgument = Annotated[
    Path, typer.Argument(help=f"The run directory. Default: the newest run below {RUNS}.", show_default=False)
]

RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help=f"The run directory, or several that hold ranks of one job. Default: the newest run below {RUNS}.",
        show_default=False,
    ),
]

RunsDirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory that holds the runs.")]


STEPS_HELP: Final = "Only these steps: A:B (B exclusive), A:B:k (one in k) or A."

StepsOption = Annotated[str, typer.Option("--steps", help=STEPS_HELP, show_default=False)]

AttemptOption = Annotated[
    int | None,
    typer.Option(
        "--attempt",
        metavar="N",
        min=0,
        help="Read this attempt of a job that was started again, or made its world anew; 0 is the first. Default: the "
        "newest.",
        show_default=False,
    ),
]

KeepOption = Annotated[
    bool,
    typer.Option(
        "--keep", help="Keep the verdict for `commtrace list` and `hosts`, in commtrace-history.sqlite beside the run."
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON; docs/json has the schema.")]

DetailsOption = Annotated[
    bool, typer.Option("--details", help="Print all findings, methods, clocks, limits, and symbols of papers too.")
]


def check_keeps_whole_run(keep: bool, runs: Sequence[Path], *limits: object) -> None:
    """Raise ConfigurationError if a verdict is to be kept that is not of one whole run."""
    if keep and (len(runs) != 1 or any(limits)):
        raise ConfigurationError(
            "--keep keeps the verdict on one whole run: leave out --steps, --baseline, --attempt, more runs"
        )


def run_directory(runs: Sequence[Path], attempt: int | None = None) -> Path:
    """Return the directory of a :data:`RunsArgument` as it was at the end of an attempt, None for the newest.

    Several runs, and an attempt, are put together by links in a temporary directory until this process ends.

    Raises:
        RunNotFoundError: it holds the worlds of a job, of which one is to be chosen.
    """
    if len(runs) == 1:
        tell_of_worlds(runs[0])
    if len(runs) == 1 and attempt is None:
        return runs[0]
    together = tempfile.TemporaryDirectory(prefix="commtrace-")
    atexit.register(together.cleanup)
    run = runs[0]
    if len(runs) > 1:
        from commtrace.trace.files.merge import link, merge

        run = Path(together.name) / "merged"
        merge(runs, run, link)
    if attempt is None:
        return run
    from commtrace.trace.files.attempts import directory_of_attempt

    target = Path(together.name) / f"{find_run_directory(run).absolute().name}-attempt-{attempt}"
    directory_of_attempt(run, attempt, target)
    return target


def tell_of_worlds(run: Path) -> None:
    """Print, on stderr, the other worlds of the job of a run, which every command reads by themselves.

    Raises:
        RunNotFoundError: the directory holds the worlds of a job, and no ranks.
    """
    from commtrace.trace.files.jobs import other_worlds, world_words, worlds_in

    if not run.is_dir():
        return
    if worlds := worlds_in(run):
        listed = "\n".join(f"  {world_words(world)}" for world in worlds)
        raise RunNotFoundError(
            f"{run} holds the {len(worlds)} worlds of a job, each with ranks of its own:\n{listed}\n"
            f"Pass one of them. All at a glance: commtrace summary {run}, commtrace list {run}"
        )
    try:
        others = other_worlds(find_run_directory(run))
    except RunNotFoundError:
        return  # the command itself says what is there
    if others:
        words = "; ".join(map(world_words, others))
        one = len(others) == 1
        have = "another world, with ranks of its own" if one else f"{len(others)} other worlds, with ranks of their own"
        typer.echo(f"commtrace: the job of {printable(str(run))} has {have}: {words}", err=True)


WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Analyse a long run in N processes. Default: the cores of this machine.",
        show_default=False,
    ),
]

ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="HOST:PORT",
        help="Analyse a long run on this Dask cluster, whose workers must see its files under the same path.",
        show_default=False,
    ),
]


BaselineOption = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Show bandwidth as a share of this file of `commtrace bench collectives`.",
        show_default=False,
    ),
]


def check_output(output: Path) -> None:
    """Raise ConfigurationError if no file can be written there: before a long run is read for it."""
    if output.is_dir():
        raise ConfigurationError(f"{output} is a directory; give the name of a file")
    if not output.parent.is_dir():
        raise ConfigurationError(f"{output}: there is no directory {output.parent}; make it, or write elsewhere")


def given_bytes(option: str, text: str) -> int:
    """Return the bytes of an option; ``K``, ``M``, ``G`` and ``T`` are powers of 1024, as for NCCL's tests."""
    with suppress(ValueError):
        if (num_bytes := parse_bytes(text, 1024)) > 0:
            return num_bytes
    raise ConfigurationError(f"{option} {text}: write a size, such as 32768, 32K, 4MiB or 1GB")


def given_memory_gib(text: str) -> float:
    """Return the GiB of ``--memory``; a number without a unit is GiB."""
    with suppress(ValueError):
        if (num_bytes := parse_bytes(text, 1024, plain="GiB")) > 0:
            return num_bytes / (1 << 30)
    raise ConfigurationError(
        f"--memory {text}: give the memory of a GPU in GiB, such as 80, or with a unit, such as 80GB"
    )


@contextmanager
def chosen_workers(count: int | None, cluster: str) -> Iterator[Workers]:
    """Yield ``count`` processes, None for the number of cores, or the workers of a Dask scheduler at ``cluster``.

    Raises:
        ConfigurationError: both are given, or no scheduler answers.
        MissingExtraError: a cluster is asked for, and Dask is not installed.
    """
    if cluster and count is not None:
        raise ConfigurationError("--workers and --cluster exclude each other: write one of them")
    if cluster:
        with _dask(cluster) as workers:
            yield workers
        return
    count = count or len(os.sched_getaffinity(0))
    if count == 1:
        yield ALONE
        return
    # Not forked: this process has threads, such as those of pyarrow. Processes start with their first task.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Workers(pool, count)


@contextmanager
def _dask(address: str) -> Iterator[Workers]:
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise MissingExtraError("--cluster needs Dask: pip install 'commtrace[cluster]'") from error
    try:
        client = Client(f"tcp://{address}", timeout=10)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{address}: no Dask scheduler answers there ({error})") from error
    try:
        yield Workers(client.get_executor(), max(sum(client.nthreads().values()), 1), (KilledWorker,))
    finally:
        client.close()
