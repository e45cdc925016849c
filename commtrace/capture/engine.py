"""Choose what records: the native part, in C, or the same in Python."""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Final, NamedTuple

from commtrace import _native
from commtrace.config import Config
from commtrace.recording import launchers
from commtrace.recording.options import NATIVE, PYTHON

_logger = logging.getLogger("commtrace")


class ChosenEngine(NamedTuple):
    """An engine that was chosen."""

    name: str  # native or python
    reason: str = ""  # why it is not native, in plain words
    core: ModuleType | None = None  # the C extension; None for Python


UNTRIED_ON_ROCM: Final = "it has not been tried on ROCm: COMMTRACE_ENGINE=native tries it"


def _is_rocm() -> bool:
    import torch

    return torch.version.hip is not None


def choose(config: Config) -> ChosenEngine:
    """Return the engine for a configuration; warn, and never raise, if it asks for one that cannot be had."""
    if config.engine == PYTHON:
        return ChosenEngine(PYTHON, "switched off by COMMTRACE_ENGINE=python")
    if config.engine != NATIVE and _is_rocm():
        return ChosenEngine(PYTHON, UNTRIED_ON_ROCM)
    core, reason = _native.load()
    if core is not None:
        return ChosenEngine(NATIVE, core=core)
    is_usual = config.engine != NATIVE and reason in (_native.NOT_BUILT, _native.FREE_THREADED)
    if not is_usual and not launchers.local_rank(os.environ):  # one rank of a node says it for all
        _logger.warning("commtrace records with its Python engine, not with the native one: %s", reason)
    return ChosenEngine(PYTHON, reason)
