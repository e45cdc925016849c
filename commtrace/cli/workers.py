"""``--executor``: who analyses the steps of a run side by side."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from commtrace.analysis.step_parts import StepWorkers
from commtrace.errors import ConfigurationError, MissingExtraError

ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="threads[:N] | processes[:N] | dask://HOST:PORT",
        help="Analyse ranges of steps side by side: in N threads or processes, or on a Dask cluster. Default: one "
        "after the other.",
        show_default=False,
    ),
]

_LOCAL: Final = re.compile(r"^(threads|processes)(?::(\d+))?$")
_DASK: Final = "dask://"


@contextmanager
def step_workers(text: str) -> Iterator[StepWorkers | None]:
    """The workers that ``--executor`` asks for; None without.

    Raises:
        ConfigurationError: the text names none, or its scheduler cannot be reached.
        MissingExtraError: Dask is asked for and not installed.
    """
    if not text:
        yield None
        return
    if text.startswith(_DASK):
        with _dask(text) as workers:
            yield workers
        return
    match = _LOCAL.match(text)
    if match is None or match[2] == "0":
        raise ConfigurationError(
            f"--executor {text!r}: write threads or processes, with :N for how many, or dask://HOST:PORT"
        )
    count = int(match[2] or os.cpu_count() or 1)
    with _pool(match[1], count) as pool:
        yield StepWorkers(pool, count)


def _pool(kind: str, count: int) -> Executor:
    if kind == "threads":
        return ThreadPoolExecutor(count)
    import multiprocessing  # only here: a command that needs no processes starts quicker without
    from concurrent.futures import ProcessPoolExecutor

    # Not forked: this process has threads, of pyarrow among others.
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


@contextmanager
def _dask(address: str) -> Iterator[StepWorkers]:
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingExtraError("--executor dask://… needs Dask: pip install 'commtrace[dask]'") from error
    try:
        client: Any = Client("tcp://" + address.removeprefix(_DASK), timeout=10)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{address}: no Dask scheduler answers there ({error})") from error
    try:
        yield StepWorkers(client.get_executor(), max(sum(client.nthreads().values()), 1))
    finally:
        client.close()
