"""How commtrace is configured: one frozen dataclass, and the only code that reads COMMTRACE_* variables."""

from __future__ import annotations

import base64
import difflib
import json
import logging
import math
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from commtrace import launchers
from commtrace.errors import ConfigurationError

_logger = logging.getLogger("commtrace")

_SHORTEST_SECONDS: Final = 0.01
_LONGEST_SHOWN: Final = 100
_MOST_BUFFER_SPANS: Final = 10_000_000
"""A full buffer of so many takes some gigabytes."""

_MOST: Final = 2**31 - 1


EXPORTERS: Final = ("monitor", "otlp", "prometheus")
"""What ``export`` may name; the table in exporters/live.py has what opens them."""


FORWARDED: Final = "PYTHON_COMMTRACE_VARIABLES"
"""``commtrace run`` puts all COMMTRACE_* variables into this one as well: DeepSpeed's launchers forward variables that
begin with PYTHON to other nodes, and of the rest only some."""

NOTES_VARIABLE: Final = "COMMTRACE_NOTES"
"""A file of ``commtrace run`` on this node, to which its ranks append their folders; no option."""

_SECRET: Final = frozenset({"COMMTRACE_MONITOR_TOKEN", "COMMTRACE_MONITOR_WEBHOOK"})
"""These are not forwarded in :data:`FORWARDED`, and an error does not repeat their values."""

_LONGEST_RUN_ID: Final = 200
_LONGEST_NODE: Final = 200


def is_run_id(text: str) -> bool:
    """Return whether a run may be called so: it becomes folders, labels and keys."""
    folders = text.split("/")
    return text.isprintable() and len(text) <= _LONGEST_RUN_ID and all(one.strip(" .") for one in folders)


def is_token(text: str) -> bool:
    """Return whether this can be the secret that a monitor shares with the ranks: long enough, printable ASCII."""
    return re.fullmatch(r"[!-~]{16,256}", text) is not None


@dataclass(frozen=True, slots=True)
class Config:
    """Options of the recorder.

    Attributes:
        enabled: False turns commtrace off: nothing is patched and nothing is written.
        dir: the run directory; ``{run_id}`` in it stands for the run's name. Empty: ``commtrace-runs/{run_id}`` below
            the working directory.
        run_id: name of the run, equal on all ranks. Empty: taken from the launcher (torchrun, Slurm), or agreed on by
            the ranks.
        steps: record only these steps: ``A:B`` (B exclusive) or ``A:B:k`` (one in k). Empty: all.
        node_id: name of this node. Empty: the host name. Set it to let one machine stand for several.
        buffer_spans: capacity of the buffer between the training thread and the harvester; what exceeds it is
            dropped and counted.
        steps_per_segment: a new trace file is started every so many steps.
        modules: record the forward and backward of these modules: ``depth=2``, or patterns of their names such as
            ``layers.*,*.self_attention``. Empty: of none.
        export: where live metrics go, several with commas between: ``prometheus``, ``monitor``, ``otlp``. Empty:
            nowhere.
        sample: record one step in so many in detail (those divisible by it), the others as sums; 0: only steps that
            ``commtrace trigger`` asks for.
        keep_steps: keep only the last so many steps of each rank; 0: all.
        keep_bytes: keep at most so many bytes of files of each rank, the newest; 0: no limit.
        skip_roles: do not time communication of process groups with these roles (``tp``, ``pp``, …).
        trigger_signal: a signal (``SIGUSR2``) that makes all ranks record the next steps in detail. Empty: none.
        hang_seconds: when nothing has moved for so long, and for ten typical steps, each rank writes down what it is
            in; 0: never.
        monitor_seconds: length of the windows that the monitor compares.
        monitor_store: ``HOST:PORT`` of a ``commtrace monitor --serve``, which then compares the ranks. Empty: rank 0
            does.
        monitor_token: the secret that it shares with the ranks. Empty: read from the user's file.
        monitor_webhook: a URL to which the monitor posts what it finds. Empty: none.
        prometheus_port: of the rank with local rank 0; the others of the node take those behind it. 0: a free one.
        prometheus_address: to listen on.
        prometheus_targets: directory of the target files for Prometheus' file_sd. Empty: ``prometheus`` in the run
            directory.
        prometheus_identity: put run, rank, node and parallel coordinates on every sample, for a discovery that does
            not know them.
        prometheus_textfile: directory of node-exporter's textfile collector. Files are written there instead of
            listening.
        prometheus_certfile, prometheus_keyfile: for TLS.
        prometheus_client_cafile: only clients with a certificate of this authority are let in.
        prometheus_auth_file: holds ``USER:PASSWORD``, which clients must give.
        otlp_level: how much of a step becomes OpenTelemetry spans: ``steps``, ``phases``, ``communication``,
            ``modules``, each with what comes before it; ``none``: metrics alone.
        otlp_sample: spans of one step in so many (those divisible by it).
        otlp_ranks: which ranks send spans, such as ``0,8`` or ``0:64:8``. Empty: all.
        otlp_file: directory of files with OTLP-JSON lines. They are written instead of sending.
        otlp_metrics: send the metrics of the Prometheus endpoint as well.
        otlp_process: make, encode and send spans in a process beside the rank; otherwise on a thread of it.
        otlp_provider: hand spans to the TracerProvider that the script has installed, if there is one.
    """

    enabled: bool = True
    dir: str = ""
    run_id: str = ""
    steps: str = ""
    node_id: str = ""
    buffer_spans: int = 200_000
    steps_per_segment: int = 100
    modules: str = ""
    export: str = ""
    sample: int = 1
    keep_steps: int = 0
    keep_bytes: int = 0
    skip_roles: tuple[str, ...] = ()
    trigger_signal: str = ""
    hang_seconds: float = 60.0
    monitor_seconds: float = 4.0
    monitor_store: str = ""
    monitor_token: str = field(default="", repr=False)
    monitor_webhook: str = field(default="", repr=False)
    prometheus_port: int = 0
    prometheus_address: str = "127.0.0.1"
    prometheus_targets: str = ""
    prometheus_identity: bool = False
    prometheus_textfile: str = ""
    prometheus_certfile: str = ""
    prometheus_keyfile: str = ""
    prometheus_client_cafile: str = ""
    prometheus_auth_file: str = ""
    otlp_level: str = "phases"
    otlp_sample: int = 1
    otlp_ranks: str = ""
    otlp_file: str = ""
    otlp_metrics: bool = False
    otlp_process: bool = True
    otlp_provider: bool = True

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Config:
        """The configuration that COMMTRACE_* variables describe; see docs/environment-variables.md.

        Raises:
            ConfigurationError: a variable has a value that cannot be used.
        """
        source = os.environ if environment is None else environment
        given = {**forwarded_variables(source), **_own_variables(source)}
        if not launchers.local_rank(source):  # one rank of a node says it for all
            for name in sorted(set(given) - set(VARIABLES) - _READ_ELSEWHERE):
                _warn_of_unknown(name)
        return cls(**{_field(name): VARIABLES[name](name, given[name]) for name in given if name in VARIABLES})

    def check(self) -> None:
        """What :meth:`from_env` cannot have let in, for configurations that a script made itself.

        Shorter times are allowed here than in variables, for tests.

        Raises:
            ConfigurationError: an option has a value that cannot be used.
        """
        for one in fields(self):
            _check_type(one.name, getattr(self, one.name), one.default)
        _buffer("buffer_spans", str(self.buffer_spans))
        _positive("steps_per_segment", str(self.steps_per_segment))
        for name in ("sample", "keep_steps"):
            _count(name, str(getattr(self, name)))
        _whole("keep_bytes", str(self.keep_bytes), 0, 10**18)
        _port("prometheus_port", str(self.prometheus_port))
        for name, least in (("hang_seconds", 0.0), ("monitor_seconds", _SHORTEST_SECONDS)):
            seconds = getattr(self, name)
            if not least <= seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds!r}: write a number of seconds of at least {least:g}")
        _run_id("run_id", str(self.run_id))
        _node("node_id", str(self.node_id))
        _token("monitor_token", self.monitor_token)
        _url("monitor_webhook", self.monitor_webhook)
        _steps("steps", str(self.steps))
        _modules("modules", str(self.modules))
        _signal("trigger_signal", str(self.trigger_signal))


def forwardable(environment: Mapping[str, str]) -> str:
    """Return the COMMTRACE_* variables of an environment as the value of :data:`FORWARDED`.

    Without what may hold a secret: launchers print what they forward.
    """
    given = {name: value for name, value in _own_variables(environment).items() if name not in _SECRET}
    return base64.urlsafe_b64encode(json.dumps(given, sort_keys=True).encode()).decode()


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what :func:`forwardable` was made of; nothing if it is not there.

    Raises:
        ConfigurationError: the value was made by nothing of commtrace.
    """
    try:
        given = json.loads(base64.urlsafe_b64decode(environment.get(FORWARDED, "") or "e30="))
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ConfigurationError(f"{FORWARDED} is not what `commtrace run` has set; unset it")
    return given


def has_variables(environment: Mapping[str, str]) -> bool:
    """Return whether any option of commtrace's is in an environment."""
    return FORWARDED in environment or bool(_own_variables(environment))


def _warn_of_unknown(name: str) -> None:
    """Recording goes on: the variable may be that of a newer version in a profile that all jobs share."""
    prefix = "COMMTRACE_"
    options = [known.removeprefix(prefix) for known in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(prefix), options, 1, cutoff=0.5)
    hint = f"did you mean {prefix}{close[0]}?" if close else "docs/environment-variables.md lists what it reads."
    _logger.warning("commtrace does not know the variable %s, and ignores it; %s", _shown(name), hint)


def _shown(value: str) -> str:
    """A value in an error: short, and without what a terminal would obey."""
    return ascii(value) if len(value) <= _LONGEST_SHOWN else ascii(value[:_LONGEST_SHOWN]) + "…"


def _own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith("COMMTRACE_") and name != NOTES_VARIABLE
    }


def _check_type(name: str, value: Any, usual: Any) -> None:
    """A number may be whole where it need not be, True is none; a text may be a path."""
    kind = type(usual)
    kinds = {float: (int, float), str: (str, os.PathLike)}.get(kind, (kind,))
    fits = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
    if kind is tuple:
        fits = fits and all(isinstance(word, str) for word in value)
    if not fits:
        example = usual if usual or kind is not tuple else ("tp",)
        raise ConfigurationError(f"{name}={_shown(str(value))}: write something like {example!r}")


def _field(variable: str) -> str:
    return variable.removeprefix("COMMTRACE_").lower()


def _boolean(name: str, value: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[value.strip().lower()]
    except KeyError:
        raise ConfigurationError(f"{name}={_shown(value)}: write 1 or 0") from None


def _text(name: str, value: str) -> str:
    return value.strip()


def _run_id(name: str, value: str) -> str:
    if value.strip() and not is_run_id(value.strip()):
        raise ConfigurationError(
            f"{name}={_shown(value)}: "
            f"write at most {_LONGEST_RUN_ID} printable characters; between slashes, not only dots"
        )
    return value.strip()


def _steps(name: str, value: str) -> str:
    # Imported here: the package must import without numpy's start-up time in processes that never record.
    from commtrace.trace.step_range import StepRange

    if value.strip():
        StepRange.parse(value)
    return value.strip()


def _modules(name: str, value: str) -> str:
    from commtrace.trace.module_choice import ModuleChoice

    if value.strip():
        ModuleChoice.parse(value)
    return value.strip()


def _whole(name: str, value: str, least: int, most: int = _MOST) -> int:
    # By its form first: int() takes digits of other scripts, and raises where there are more than 4,300.
    number = int(value) if re.fullmatch(r"\s*[0-9]{1,18}\s*", value) else -1
    if not least <= number <= most:
        raise ConfigurationError(f"{name}={_shown(value)}: write a whole number of at least {least}, at most {most}")
    return number


def _positive(name: str, value: str) -> int:
    return _whole(name, value, 1)


def _buffer(name: str, value: str) -> int:
    return _whole(name, value, 1, _MOST_BUFFER_SPANS)


def _count(name: str, value: str) -> int:
    return _whole(name, value, 0)


_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_LEAST_BYTES: Final = 10**6


def _bytes(name: str, value: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})\s*([KMGT]?)B?", value.strip().upper())
    number = int(match[1]) * _UNITS[match[2]] if match else -1
    if number != 0 and number < _LEAST_BYTES:
        raise ConfigurationError(
            f"{name}={_shown(value)}: write bytes, at least 1M, such as 500M or 2G; 0 for no limit"
        )
    return number


def _seconds(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.5 <= number <= 3600:
        raise ConfigurationError(f"{name}={_shown(value)}: write a number of seconds from 0.5 to 3600")
    return number


def _seconds_or_never(name: str, value: str) -> float:
    return 0.0 if value.strip() in ("0", "0.0") else _seconds(name, value)


def _export(name: str, value: str) -> str:
    unknown = sorted({word.lower() for word in _words(name, value)} - set(EXPORTERS))
    if unknown:
        raise ConfigurationError(
            f"{name}={_shown(value)}: write any of {', '.join(EXPORTERS)}, not {', '.join(unknown)}"
        )
    return value.strip()


def _words(name: str, value: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in value.split(","))))


_TRIGGER_SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGPWR", "SIGRTMIN", "SIGRTMAX")
"""Signals that mean nothing else to Python, to launchers or to the system: others would end or stop the job."""


def _signal(name: str, value: str) -> str:
    word = value.strip().upper()
    if word and not (word in _TRIGGER_SIGNALS and hasattr(signal, word)):
        raise ConfigurationError(f"{name}={_shown(value)}: write one of {', '.join(_TRIGGER_SIGNALS)}")
    return word


def _port(name: str, value: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,5}\s*", value) or int(value) > 65535:
        raise ConfigurationError(f"{name}={_shown(value)}: write a port number, or 0 for a free one")
    return int(value)


def _node(name: str, value: str) -> str:
    word = value.strip()
    if not word.isprintable() or len(word) > _LONGEST_NODE:
        raise ConfigurationError(f"{name}={_shown(value)}: write at most {_LONGEST_NODE} printable characters")
    return word


def _token(name: str, value: str) -> str:
    word = value.strip()
    if word and not is_token(word):
        raise ConfigurationError(f"{name}: write 16 to 256 printable ASCII characters without spaces")
    return word


def _url(name: str, value: str) -> str:
    word = value.strip()
    if word and not re.fullmatch(r"https?://[!-~]+", word, re.IGNORECASE):
        raise ConfigurationError(f"{name}: write a URL that begins with http:// or https://")
    return word


OTLP_LEVELS: Final = ("none", "steps", "phases", "communication", "modules")
"""Each holds what those before it hold."""


def _otlp_level(name: str, value: str) -> str:
    word = value.strip().lower()
    if word not in OTLP_LEVELS:
        raise ConfigurationError(f"{name}={_shown(value)}: write one of {', '.join(OTLP_LEVELS)}")
    return word


def _ranks(name: str, value: str) -> str:
    from commtrace.trace.step_range import StepRange

    try:
        for part in filter(str.strip, value.split(",")):
            StepRange.parse(part)
    except ConfigurationError:
        raise ConfigurationError(
            f"{name}={_shown(value)}: write ranks, such as 0,8 or 0:64:8 (A:B:k, B exclusive)"
        ) from None
    return value.strip()


VARIABLES: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "COMMTRACE_ENABLED": _boolean,
    "COMMTRACE_DIR": _text,
    "COMMTRACE_RUN_ID": _run_id,
    "COMMTRACE_STEPS": _steps,
    "COMMTRACE_NODE_ID": _node,
    "COMMTRACE_BUFFER_SPANS": _buffer,
    "COMMTRACE_STEPS_PER_SEGMENT": _positive,
    "COMMTRACE_MODULES": _modules,
    "COMMTRACE_EXPORT": _export,
    "COMMTRACE_SAMPLE": _count,
    "COMMTRACE_KEEP_STEPS": _count,
    "COMMTRACE_KEEP_BYTES": _bytes,
    "COMMTRACE_SKIP_ROLES": _words,
    "COMMTRACE_TRIGGER_SIGNAL": _signal,
    "COMMTRACE_HANG_SECONDS": _seconds_or_never,
    "COMMTRACE_MONITOR_SECONDS": _seconds,
    "COMMTRACE_MONITOR_STORE": _text,
    "COMMTRACE_MONITOR_TOKEN": _token,
    "COMMTRACE_MONITOR_WEBHOOK": _url,
    "COMMTRACE_PROMETHEUS_PORT": _port,
    "COMMTRACE_PROMETHEUS_ADDRESS": _text,
    "COMMTRACE_PROMETHEUS_TARGETS": _text,
    "COMMTRACE_PROMETHEUS_IDENTITY": _boolean,
    "COMMTRACE_PROMETHEUS_TEXTFILE": _text,
    "COMMTRACE_PROMETHEUS_CERTFILE": _text,
    "COMMTRACE_PROMETHEUS_KEYFILE": _text,
    "COMMTRACE_PROMETHEUS_CLIENT_CAFILE": _text,
    "COMMTRACE_PROMETHEUS_AUTH_FILE": _text,
    "COMMTRACE_OTLP_LEVEL": _otlp_level,
    "COMMTRACE_OTLP_SAMPLE": _positive,
    "COMMTRACE_OTLP_RANKS": _ranks,
    "COMMTRACE_OTLP_FILE": _text,
    "COMMTRACE_OTLP_METRICS": _boolean,
    "COMMTRACE_OTLP_PROCESS": _boolean,
    "COMMTRACE_OTLP_PROVIDER": _boolean,
}
"""Every variable that commtrace reads in a training process, and how its value is parsed."""

_READ_ELSEWHERE: Final = {"COMMTRACE_REFERENCE_DATA"}
"""Variables of the tests: known, and not an option of the recorder."""
