"""The versions that commtrace is tried with, each row in an environment of its own, one after the other.

    nox --list
    nox -s "versions(torch 2.9.1, Python 3.13)"
    nox                                     # all rows: hours, and up to 8 GB of disk at a time

A row installs torch and commtrace, tries the trainings that need nothing else, and then each framework of the row. Its
last lines are the cells for docs/support.md, which are also appended to ``matrix.jsonl``. Where a Python or a build of
torch cannot be had, the row is skipped or fails at its installation: neither says anything about commtrace.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import nox

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "venv"


class Row(NamedTuple):
    """One environment.

    Attributes:
        frameworks: what pip installs for one cell, and the kind of training (tests/matrix/training.py).
    """

    python: str
    torch: str
    frameworks: tuple[tuple[str, str], ...] = ()


def _megatron(version: str) -> tuple[str, str]:
    return f"megatron-core=={version}", "megatron"


def _deepspeed(version: str) -> tuple[str, str]:
    return f"deepspeed=={version}", "deepspeed"


ROWS = (
    Row("3.10", "2.4.1", (_megatron("0.12.3"), _megatron("0.13.1"), _deepspeed("0.15.4"))),
    Row("3.11", "2.5.1"),
    Row("3.11", "2.6.0"),
    Row("3.12", "2.7.1", (_megatron("0.14.0"), _deepspeed("0.16.9"))),
    Row("3.11", "2.8.0"),
    Row("3.13", "2.9.1", (_deepspeed("0.17.6"),)),
    Row("3.11", "2.10.0"),
    Row("3.11", "2.11.0", (_megatron("0.15.3"), _deepspeed("0.18.9"))),
    Row("3.11", "2.12.0"),
    Row(
        "3.11",
        "2.13.0",
        (
            _megatron("0.16.1"),
            _deepspeed("0.19.8"),
            ("transformers accelerate", "transformers"),
            ("accelerate", "accelerate"),
            ("lightning", "lightning"),
        ),
    ),
    Row("3.13", "2.13.0"),
    Row("3.12", "2.14.1", (_megatron("0.17.1"), _megatron("0.18.2"))),
    Row("3.12", "2.15.0", (_megatron("0.19.2"),)),
    Row("3.13", "2.15.0"),
)
PLAIN = ("python", "ddp", "fsdp", "pipelining")


def _name(row: Row) -> str:
    return f"torch {row.torch}, Python {row.python}"


@nox.session
@nox.parametrize(("python", "row"), [nox.param(row.python, row, id=_name(row)) for row in ROWS])
def versions(session: nox.Session, row: Row) -> None:
    """Steps found and communications recorded, on one version of torch and the frameworks of its time."""
    torch = f"torch=={row.torch}"
    session.install(torch)
    session.install("--editable", ".", "pytest", "hypothesis", "setuptools", "wheel", "ninja")
    session.run("python", "-c", "import commtrace.integrations, torch; print(commtrace.__version__, torch.__version__)")
    _try(session, *PLAIN)
    for packages, kind in row.frameworks:
        # Everything in one call, so that pip finds versions that fit all of it.
        session.install(torch, "--editable", ".", *packages.split())
        _try(session, kind)


def _try(session: nox.Session, *kinds: str) -> None:
    """Write down what comes of each kind; a cell that is wrong is for the reader, one that is missing ends the row."""
    for kind in kinds:
        printed = session.run("python", "-m", "tests.matrix.cell", kind, silent=True, success_codes=[0, 1])
        cells = [line for line in str(printed).splitlines() if line.startswith("{")]
        if len(cells) != 1:
            session.error(f"{kind}: {printed}")
        session.log(cells[0])
        with Path(os.environ.get("MATRIX", "matrix.jsonl")).open("a") as file:
            file.write(f"{cells[0]}\n")
