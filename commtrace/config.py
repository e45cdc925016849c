"""How commtrace is configured: one frozen dataclass, and the only code that reads COMMTRACE_* variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from commtrace.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Config:
    """Options of the recorder.

    Attributes:
        enabled: False turns commtrace off: nothing is patched and nothing is written.
        dir: the run directory. Empty: ``commtrace-runs/RUN_ID`` below the working directory.
        run_id: name of the run, equal on all ranks. Empty: taken from the launcher (torchrun, Slurm).
        steps: record only these steps: ``A:B`` (B exclusive) or ``A:B:k`` (one in k). Empty: all.
        node_id: name of this node. Empty: the host name. Set it to let one machine stand for several.
        buffer_spans: capacity of the buffer between the training thread and the harvester; what exceeds it is
            dropped and counted.
        steps_per_segment: a new trace file is started every so many steps.
        export: where live metrics go, several with commas between: ``prometheus``. Empty: nowhere.
    """

    enabled: bool = True
    dir: str = ""
    run_id: str = ""
    steps: str = ""
    node_id: str = ""
    buffer_spans: int = 200_000
    steps_per_segment: int = 100
    export: str = ""

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Config:
        """The configuration that COMMTRACE_* variables describe; see docs/environment-variables.md.

        Raises:
            ConfigurationError: a variable has a value that cannot be used, or commtrace knows no such variable.
        """
        source = os.environ if environment is None else environment
        given = {name: value for name, value in source.items() if name.startswith("COMMTRACE_")}
        unknown = sorted(set(given) - set(VARIABLES) - _READ_ELSEWHERE)
        if unknown:
            raise ConfigurationError(
                f"unknown variables {', '.join(unknown)}; commtrace reads {', '.join(sorted(VARIABLES))}"
            )
        return cls(**{_field(name): VARIABLES[name](name, given[name]) for name in given if name in VARIABLES})


def _field(variable: str) -> str:
    return variable.removeprefix("COMMTRACE_").lower()


def _boolean(name: str, value: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[value.strip().lower()]
    except KeyError:
        raise ConfigurationError(f"{name}={value!r}: write 1 or 0") from None


def _text(name: str, value: str) -> str:
    return value.strip()


def _steps(name: str, value: str) -> str:
    # Imported here: the package must import without numpy's start-up time in processes that never record.
    from commtrace.trace.step_range import StepRange

    if value.strip():
        StepRange.parse(value)
    return value.strip()


def _positive(name: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"{name}={value!r}: write a whole number of at least 1")
    return number


VARIABLES: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "COMMTRACE_ENABLED": _boolean,
    "COMMTRACE_DIR": _text,
    "COMMTRACE_RUN_ID": _text,
    "COMMTRACE_STEPS": _steps,
    "COMMTRACE_NODE_ID": _text,
    "COMMTRACE_BUFFER_SPANS": _positive,
    "COMMTRACE_STEPS_PER_SEGMENT": _positive,
    "COMMTRACE_EXPORT": _text,
}
"""Every variable that commtrace reads in a training process, and how its value is parsed."""

_READ_ELSEWHERE: Final = {"COMMTRACE_REFERENCE_DATA"}
"""Variables of the tests: known, and not an option of the recorder."""
