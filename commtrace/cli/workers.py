"""``--workers`` and ``--cluster``: who reads and measures the windows of a long run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from commtrace.analysis.windows.run import ALONE, Workers
from commtrace.errors import ConfigurationError, MissingExtraError

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


@contextmanager
def chosen_workers(count: int | None, cluster: str) -> Iterator[Workers]:
    """Yield the workers that the options ask for.

    Args:
        count: processes; None for as many as this machine has cores.
        cluster: address of a Dask scheduler; empty for processes.

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
    # Not forked: this process has threads, of pyarrow among others. Processes start when they get something to do.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Workers(pool, count)


@contextmanager
def _dask(address: str) -> Iterator[Workers]:
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise MissingExtraError("--cluster needs Dask: pip install 'commtrace[cluster]'") from error
    try:
        client: Any = Client(f"tcp://{address}", timeout=10)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{address}: no Dask scheduler answers there ({error})") from error
    try:
        yield Workers(client.get_executor(), max(sum(client.nthreads().values()), 1), (KilledWorker,))
    finally:
        client.close()
