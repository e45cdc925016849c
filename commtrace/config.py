"""The configuration of commtrace: frozen dataclasses, and the only code that reads COMMTRACE_* variables.

Every option is declared once, below. Its variable is ``COMMTRACE_``, the name of its section and its own name:
``COMMTRACE_MONITOR_SECONDS`` is ``Config(monitor=MonitorConfig(seconds=…))``.
"""

from __future__ import annotations

import base64
import difflib
import json
import logging
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from commtrace.errors import ConfigurationError
from commtrace.recording import launchers
from commtrace.recording.options import (
    AUTO,
    BYTES,
    ENGINE,
    EXPORT,
    FLAG,
    GRAPHS_RECORDED,
    LAYOUT,
    MODULES,
    NODE,
    OTLP_LEVEL,
    PAGERDUTY,
    PATH,
    PORT,
    RANKS,
    REPLAYS,
    RUN_ID,
    SECONDS,
    SECONDS_OR_NEVER,
    SIGNAL,
    SLACK,
    STEPS,
    TEXT,
    TOKEN,
    URL,
    WEBHOOK_FORMAT,
    WORDS,
    Option,
    check_options,
    option,
    options_of,
    read_layout,
    shorten,
    whole_number,
)

__all__ = ["BaselineConfig", "Config", "MonitorConfig", "OtlpConfig", "PrometheusConfig", "TensorboardConfig"]

_logger = logging.getLogger("commtrace")

FilePath = str | os.PathLike[str]

FORWARDED: Final = "PYTHON_COMMTRACE_VARIABLES"
"""``commtrace run`` puts all COMMTRACE_* variables into this one as well: DeepSpeed's launchers forward variables that
begin with PYTHON to other nodes, and of the rest only some."""

RUN_ID_VARIABLE: Final = "COMMTRACE_RUN_ID"

NOTES_VARIABLE: Final = "COMMTRACE_NOTES"
"""A file of ``commtrace run`` on this node, to which its ranks append their folders; no option."""

BY_SHELL: Final = "\0"
"""Follows a folder there if a shell below ``commtrace run`` started the rank. It is in no path."""

_PREFIX: Final = "COMMTRACE_"
_RUN_ID: Final = "COMMTRACE_RUN_ID"  # read again when the job begins: see commtrace/recording/identity.py

_WEBHOOK_HOSTS: Final = {
    "hooks.slack.com": SLACK,
    "hooks.slack-gov.com": SLACK,
    "events.pagerduty.com": PAGERDUTY,
    "events.eu.pagerduty.com": PAGERDUTY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Options of the monitor that compares the ranks while they train; the errors are those of :class:`Config`."""

    seconds: float = option(
        4.0,
        SECONDS,
        "Length of the windows over which the [monitor](monitor.md) compares ranks.",
        example="10",
    )
    store: str = option(
        "",
        TEXT,
        "Address of a [`commtrace monitor`](monitor.md#a-monitor-outside-of-the-job), which then "
        "compares the ranks. Empty: rank 0 does.",
        example="login1:29555",
    )
    token: str = option(
        "",
        TOKEN,
        "The secret that ranks share with it: 16 to 256 printable characters, no spaces. Empty: read from "
        "`~/.config/commtrace/monitor-token`.",
        example="0f3c6b0a4d6e4f5a9d7c1b2e8a7f6c5d",
        is_secret=True,
    )
    webhook: str = option(
        "",
        URL,
        "A URL to which the monitor [posts every finding](monitor.md#webhook).",
        example="https://hooks.slack.com/services/T0/B0/abc",
        is_secret=True,
    )
    webhook_format: str = option(
        "",
        WEBHOOK_FORMAT,
        "The form of these posts: `json`, `slack`, `pagerduty`. Empty: by the host of the URL, else `json`.",
        example="slack",
    )
    webhook_key: str = option(
        "",
        TEXT,
        "The integration key of a service of PagerDuty (Events API v2).",
        example="0f3c6b0a4d6e4f5a9d7c1b2e8a7f6c5d",
        is_secret=True,
    )

    def __post_init__(self) -> None:
        check_options(self, "monitor.")
        if self.webhook and self.webhook_receiver == PAGERDUTY and not self.webhook_key:
            raise ConfigurationError(
                "monitor: PagerDuty needs the integration key of a service, webhook_key (COMMTRACE_MONITOR_WEBHOOK_KEY)"
            )

    @property
    def webhook_receiver(self) -> str:
        """Return ``json``, ``slack`` or ``pagerduty``."""
        try:
            host = urllib.parse.urlsplit(self.webhook).hostname
        except ValueError:
            host = None
        return self.webhook_format or _WEBHOOK_HOSTS.get(host or "", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusConfig:
    """Options of the endpoint, or the file, that Prometheus reads; the errors are those of :class:`Config`."""

    port: int = option(
        0,
        PORT,
        "Port of the rank with local rank 0 ([prometheus.md](prometheus.md)); the other ranks of the node "
        "take the ports behind it. `0`: a free one each.",
        example="9400",
    )
    address: str = option(
        "127.0.0.1",
        TEXT,
        "Address on which every rank listens for Prometheus.",
        example="0.0.0.0",
    )
    targets: FilePath = option(
        "",
        PATH,
        "Directory of the target files for Prometheus' `file_sd_configs`. Empty: `prometheus` in the run directory.",
        example="/shared/prometheus-targets",
    )
    identity: bool = option(
        False,
        FLAG,
        "`1` puts run, rank, node and parallel coordinates on every sample, for a discovery that does not know them.",
        example="1",
    )
    textfile: FilePath = option(
        "",
        PATH,
        "Directory of node-exporter's textfile collector. Every rank writes a file there instead of listening.",
        example="/var/lib/node_exporter",
    )
    certfile: FilePath = option(
        "",
        PATH,
        "Certificate of the endpoint, for TLS; needs the key file as well.",
        example="tls/cert.pem",
    )
    keyfile: FilePath = option(
        "",
        PATH,
        "Private key of the endpoint, for TLS; needs the certificate as well.",
        example="tls/key.pem",
    )
    client_cafile: FilePath = option(
        "",
        PATH,
        "Only clients with a certificate of this authority are let in. Needs TLS.",
        example="tls/ca.pem",
    )
    auth_file: FilePath = option(
        "",
        PATH,
        "A file that holds `USER:PASSWORD`, which clients must give (HTTP basic authentication).",
        example="secrets/prometheus",
    )

    def __post_init__(self) -> None:
        check_options(self, "prometheus.")
        if bool(self.certfile) != bool(self.keyfile):
            raise ConfigurationError(
                "prometheus: TLS needs both, certfile and keyfile (COMMTRACE_PROMETHEUS_CERTFILE, "
                "COMMTRACE_PROMETHEUS_KEYFILE); only one is set"
            )
        if self.client_cafile and not self.certfile:
            raise ConfigurationError(
                "prometheus: client_cafile (COMMTRACE_PROMETHEUS_CLIENT_CAFILE) needs TLS: set certfile and keyfile "
                "(COMMTRACE_PROMETHEUS_CERTFILE, COMMTRACE_PROMETHEUS_KEYFILE) as well"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpConfig:
    """Options of the export to OpenTelemetry; the errors are those of :class:`Config`."""

    level: str = option(
        "phases",
        OTLP_LEVEL,
        "How much of a step becomes [OpenTelemetry](opentelemetry.md) spans: `steps`, `phases`, "
        "`communication`, `modules`, each with what comes before it. `none`: metrics alone.",
        example="communication",
    )
    sample: int = option(
        1,
        whole_number(1),
        "Send spans of one step in so many (those whose number it divides).",
        example="50",
    )
    ranks: str = option(
        "",
        RANKS,
        "Ranks that send spans: numbers and `A:B:k` (B exclusive), with commas between. Empty: all.",
        example="0:64:8",
    )
    file: FilePath = option(
        "",
        PATH,
        "Directory for files of OTLP-JSON lines, one per rank. They are written instead of sending.",
        example="/shared/otlp",
    )
    metrics: bool = option(
        False,
        FLAG,
        "`1` sends the metrics of the Prometheus endpoint over OTLP, of every rank.",
        example="1",
    )
    process: bool = option(
        True,
        FLAG,
        "`0` makes and sends spans on a thread of the rank; else in a process beside it, which leaves "
        "training its interpreter.",
        example="0",
    )
    provider: bool = option(
        True,
        FLAG,
        "`0` leaves a TracerProvider that the script has installed alone; else spans go to its processors.",
        example="0",
    )

    def __post_init__(self) -> None:
        check_options(self, "otlp.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardConfig:
    """Options of TensorBoard's file; the errors are those of :class:`Config`."""

    dir: FilePath = option(
        "",
        PATH,
        "A folder of its own for [TensorBoard](scalars.md#tensorboard)'s file; `{run_id}` in it stands for the run's "
        "name. Empty: `tensorboard` in the run directory.",
        example="/shared/tb/{run_id}/commtrace",
    )

    def __post_init__(self) -> None:
        check_options(self, "tensorboard.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig:
    """What live communication is compared with; the errors are those of :class:`Config`."""

    file: FilePath = option(
        "",
        PATH,
        "A file of [`commtrace bench collectives`](benchmarks.md#does-my-job-reach-it-now), on every node: metrics of "
        "Prometheus, also over OTLP, then have communication as a share of it. Empty: they have none.",
        example="/shared/baseline.json",
    )

    def __post_init__(self) -> None:
        check_options(self, "baseline.")


_SECTIONS: Final[Mapping[str, type]] = {
    "monitor": MonitorConfig,
    "prometheus": PrometheusConfig,
    "otlp": OtlpConfig,
    "tensorboard": TensorboardConfig,
    "baseline": BaselineConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of the recorder; docs/environment-variables.md has the meaning of each.

    >>> Config(dir="runs/a", export="monitor", monitor=MonitorConfig(store="login1:29555"))  # doctest: +SKIP

    Raises:
        ConfigurationError: an option has a value that cannot be used; it is a ValueError.
    """

    enabled: bool = option(
        True,
        FLAG,
        "`0` turns commtrace off: nothing is patched, nothing is written. Also `true`/`false`, `yes`/`no`, `on`/`off`.",
        example="0",
    )
    dir: FilePath = option(
        "",
        PATH,
        "The run directory; `{run_id}` in it stands for the run's name. Empty: `commtrace-runs/{run_id}` "
        "below the working directory. On several nodes: a shared file system, or one directory per node, "
        "which `commtrace merge` [brings together](recording.md#one-job-is-one-run).",
        example="/shared/runs/{run_id}",
    )
    run_id: str = option(
        "",
        RUN_ID,
        "Name of the run, at most 200 printable characters. Rank 0's name is used by all. Empty: taken from "
        "torchrun's `--rdzv-id` or from Slurm, else from the launcher's process on rank 0 "
        "([how](recording.md#one-job-is-one-run)).",
        example="gpt-7b-lr3e-4",
    )
    steps: str = option(
        "",
        STEPS,
        "Record only these steps: `A:B` (B exclusive), `A:B:k` (one in k), or a single `A`. Empty: all.",
        example="100:110",
    )
    node_id: str = option(
        "",
        NODE,
        "Name of this node. Empty: the host name. Ranks with different names are treated as if they were on "
        "different hosts, with clocks of their own: one machine can stand for several.",
        example="node-2",
    )
    buffer_spans: int = option(
        200_000,
        whole_number(1, 10_000_000),
        "Capacity of the buffer between the training thread and the thread that writes. Further "
        "spans are dropped and counted.",
        example="50000",
    )
    steps_per_segment: int = option(
        100,
        whole_number(1),
        "A new trace file is started every so many steps.",
        example="20",
    )
    modules: str = option(
        "",
        MODULES,
        "Record the forward and backward of these modules: `depth=2`, or patterns of their names "
        "([recording.md](recording.md#modules)). Empty: of none, at no cost.",
        example="layers.*,*.self_attention",
    )
    export: str = option(
        "",
        EXPORT,
        "Where live metrics go while training runs, several with commas between: `mlflow`, `monitor`, `otlp`, "
        "`prometheus`, `tensorboard`, `wandb`. Empty: nowhere.",
        example="monitor,prometheus",
    )
    sample: int = option(
        1,
        whole_number(0),
        "Record one step in so many in detail (those whose number it divides), of the others the duration and "
        "sums. `0`: only steps that are [asked for](recording.md#runs-of-weeks).",
        example="50",
    )
    quiet: int = option(
        0,
        whole_number(0, 10),
        "Per cent of the steps that are not recorded, three at a time at places that are drawn, so that the run itself "
        "[measures what recording costs](own-cost.md). The first ones, a hundred at 3 per cent, are all recorded. `0`: "
        "every step is.",
        example="3",
    )
    keep_steps: int = option(
        0,
        whole_number(0),
        "Keep the last so many steps of each rank; older files are deleted. `0`: all.",
        example="10000",
    )
    keep_bytes: int = option(
        0,
        BYTES,
        "Keep at most so many bytes of files of each rank, the newest; older ones are deleted. `K`, `M`, `G` "
        "and `T` are powers of 1000, `KiB`, `MiB`, `GiB` and `TiB` of 1024; at least `1M`. `0`: no limit.",
        example="2G",
    )
    skip_roles: tuple[str, ...] = option(
        (),
        WORDS,
        "Do not time communication of process groups with these roles, separated by commas. It is numbered "
        "all the same, and readers say that it is missing.",
        example="tp,ep",
    )
    layout: str = option(
        "",
        LAYOUT,
        "Sizes of the parallel dimensions, that of neighbouring ranks first, where no framework tells them: of a "
        "pipeline that is written by hand, for example ([recording.md](recording.md#parallelism-by-hand)). Empty: "
        "what the framework says.",
        example="tp=2,pp=4,dp=2",
    )
    trigger_signal: str = option(
        "",
        SIGNAL,
        "A signal that, sent to one rank, makes all ranks record the next 10 steps in detail. A handler that "
        "the script had set before is called as well.",
        example="SIGUSR2",
    )
    hang_seconds: float = option(
        60.0,
        SECONDS_OR_NEVER,
        "After so many seconds without progress, and ten typical steps, every rank writes its state to a "
        "file ([doctor.md](doctor.md#while-it-hangs)). `0`: never.",
        example="300",
    )
    findings_seconds: float = option(
        3.0,
        SECONDS_OR_NEVER,
        "At the end of a job that is not below `commtrace run`, rank 0 says [what was found](recording.md#the-end-of-a-"
        "job), and waits for that at most so many seconds. `0`: never, also not by `commtrace run`.",
        example="0",
    )
    engine: str = option(
        AUTO,
        ENGINE,
        "What records: `native`, the part in C, or `python`, which records the same and needs more CPU time "
        "([production.md](production.md#the-native-part)). `auto`: `native` where it can be had.",
        example="python",
    )
    graphs: str = option(
        REPLAYS,
        GRAPHS_RECORDED,
        "What is recorded of CUDA graphs: `replays`, with the communication that each contains "
        "([coverage.md](coverage.md#cuda-graphs)); `stamps`, with device times of that communication too, for which "
        "nodes are added to the graphs ([coverage.md](coverage.md#stamps-in-cuda-graphs)); or nothing (`off`).",
        example="off",
    )
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    otlp: OtlpConfig = field(default_factory=OtlpConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)

    def __new__(cls, **given: object) -> Config:
        """Refuse names that options had before there were sections, with the name that they have now."""
        for name in given:
            section, _, inner = name.partition("_")
            if section in _SECTIONS and inner in options_of(_SECTIONS[section]):
                kind = _SECTIONS[section].__name__
                raise ConfigurationError(
                    f"{name} is now {section}={kind}({inner}=…), with `from commtrace.config import {kind}`"
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        for name, kind in _SECTIONS.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                raise ConfigurationError(f"{name}={shorten(given)}: write {kind.__name__}(…), of commtrace.config")

    @property
    def layout_sizes(self) -> dict[str, int]:
        """Return the size of each dimension of ``layout``, that of neighbouring ranks first."""
        return read_layout(self.layout)

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Return the configuration that COMMTRACE_* variables describe; see docs/environment-variables.md.

        Raises:
            ConfigurationError: a variable has a value that cannot be used.
        """
        source = os.environ if environment is None else environment
        given = {**forwarded_variables(source), **own_variables(source)}
        if not launchers.local_rank(source):  # one rank of a node says it for all
            for name in sorted(set(given) - set(VARIABLES)):
                _warn_of_unknown(name)
        values: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
        for name, variable in VARIABLES.items():
            if name in given:
                values[variable.section][variable.name] = variable.option.read(name, given[name])
        sections = {section: kind(**values[section]) for section, kind in _SECTIONS.items()}
        return cls(**values[""], **sections)


class Variable(NamedTuple):
    """A variable of the environment: the section (empty: :class:`Config`) and the option that it sets."""

    section: str
    name: str
    option: Option


VARIABLES: Final[Mapping[str, Variable]] = {
    f"{_PREFIX}{f'{section}_' if section else ''}{name}".upper(): Variable(section, name, declared)
    for section, kind in {"": Config, **_SECTIONS}.items()
    for name, declared in options_of(kind).items()
}
"""Every variable that commtrace reads in a training process."""

_SECRET: Final = frozenset(name for name, variable in VARIABLES.items() if variable.option.is_secret)


def forwardable(environment: Mapping[str, str]) -> str:
    """Return the COMMTRACE_* variables, without secrets, as :data:`FORWARDED`: launchers print what they forward."""
    given = {name: value for name, value in own_variables(environment).items() if name not in _SECRET}
    return base64.urlsafe_b64encode(json.dumps(given, sort_keys=True).encode()).decode()


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in the value of :func:`forwardable`, if any; raise ConfigurationError for another value."""
    try:
        given = json.loads(base64.urlsafe_b64decode(environment.get(FORWARDED, "") or "e30="))
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ConfigurationError(f"{FORWARDED} is not what `commtrace run` has set; unset it")
    return given


def has_variables(environment: Mapping[str, str]) -> bool:
    return FORWARDED in environment or bool(own_variables(environment))


def changed_variables(before: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the variables of options that have another value than ``before``; without that of the run's name."""
    now = own_variables(environment)
    return sorted(name for name in set(VARIABLES) - {_RUN_ID} if before.get(name) != now.get(name))


def _warn_of_unknown(name: str) -> None:
    # No error: it may be that of a newer version, in a profile that all jobs share.
    options = [known.removeprefix(_PREFIX) for known in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), options, 1, cutoff=0.5)
    hint = f"did you mean {_PREFIX}{close[0]}?" if close else "docs/environment-variables.md lists what it reads."
    _logger.warning("commtrace does not know the variable %s, and ignores it; %s", shorten(name), hint)


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that begin as ours do."""
    return {name: value for name, value in environment.items() if name.startswith(_PREFIX) and name != NOTES_VARIABLE}
