"""Check that a job started here would be recorded: ``commtrace doctor`` without a run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

import commtrace
from commtrace import _native
from commtrace.analysis.engines import COST, engine_words, engines_used
from commtrace.config import VARIABLES, Config
from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.exporters.monitor.rendezvous import Address, read_token, token_path
from commtrace.live.http.redaction import redacted_url
from commtrace.recording import identity, launchers
from commtrace.recording.installation import TRIED, import_pyarrow
from commtrace.trace.files.reader import load_run
from commtrace.trace.json_values import JsonObject

_SECONDS: Final = 120.0
_CONNECT_SECONDS: Final = 3.0
_LITTLE_SPACE: Final = 1 << 30

_BYPASSES: Final = {
    "transformer_engine": "user buffers of Transformer Engine (tp-comm-overlap)",
    "deep_ep": "DeepEP",
    "nvshmem": "NVSHMEM",
}
"""By module, communication that does not pass through torch.distributed; see docs/coverage.md."""

State = Literal["ok", "note", "problem"]


class Check(NamedTuple):
    """The finding of one check."""

    subject: str
    state: State  # problem: a job started here would not be recorded, or not as configured
    text: str
    advice: str = ""  # empty if there is nothing to do

    def to_json(self) -> JsonObject:
        return self._asdict()


def check_installation(environment: Mapping[str, str], *, record: bool = True) -> list[Check]:
    """Check the installation, and the configuration in these variables; with ``record``, make a small recording too."""
    checks = [_commtrace(), _native_part(), *_packages(), *_frameworks()]
    try:
        config = Config.from_env(environment)
    except (ConfigurationError, ValueError) as error:
        checks.append(
            Check("variables", "problem", str(error), "Correct the variable; until then nothing is recorded.")
        )
        config = None
    if config is not None:
        checks += [*_variables(config, environment), _launcher(environment), *_directory(config, environment)]
        checks += _exporters(config)
    checks += [*_clocks(), *_device(), *_bypasses()]
    if record and not any(check.subject in ("torch", "pyarrow") and check.state == "problem" for check in checks):
        checks += try_recording(environment, config=config)
    return checks


def _commtrace() -> Check:
    folder = Path(commtrace.__file__).parent
    text = f"{commtrace.__version__} in {folder}, Python {platform.python_version()} ({sys.executable})"
    missing = [
        name for name in ("exporters", "integrations", "viewer") if not (folder / name / "__init__.py").is_file()
    ]
    if missing:
        return Check(
            "commtrace", "problem", f"{text}; {', '.join(missing)} missing",
            "The checkout lost its symbolic links: git config core.symlinks true, then git checkout -- commtrace.",
        )  # fmt: skip
    return Check("commtrace", "ok", text)


def _native_part() -> Check:
    core, reason = _native.load()
    return Check("native part", "note", reason) if core is None else Check("native part", "ok", "is built, and loads")


def _packages() -> Iterator[Check]:
    try:
        import_pyarrow()
        yield Check("pyarrow", "ok", importlib.metadata.version("pyarrow"))
    except CommtraceError as error:
        yield Check("pyarrow", "problem", str(error))
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "problem", "is not installed", "Recording needs torch; reading a run does not.")
    else:
        yield _tried("torch", importlib.metadata.version("torch"))


def _frameworks() -> Iterator[Check]:
    for package in ("megatron-core", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield _tried(package, importlib.metadata.version(package))


def _tried(package: str, version: str) -> Check:
    number = re.match(r"(\d+)\.(\d+)", version)
    tried = TRIED[package]
    if number is not None and not tried.oldest <= (int(number[1]), int(number[2])) <= tried.newest:
        oldest, newest = (".".join(map(str, end)) for end in tried)
        return Check(package, "note", f"{version}; tried with {oldest} to {newest}")
    return Check(package, "ok", version)


def _variables(config: Config, environment: Mapping[str, str]) -> Iterator[Check]:
    given = sorted(name for name in environment if name.startswith("COMMTRACE_"))
    unknown = [name for name in given if name not in VARIABLES]
    if unknown:
        yield Check(
            "variables", "note", f"not known, ignored: {', '.join(unknown)}", "See docs/environment-variables.md."
        )
    if not config.enabled:
        yield Check("variables", "problem", "COMMTRACE_ENABLED turns commtrace off", "unset COMMTRACE_ENABLED")
        return
    what = ["every step" if not config.steps else f"steps {config.steps} only"]
    if config.sample != 1:
        what.append(f"one step in {config.sample} in detail" if config.sample else "no step in detail but on request")
    what.append(f"modules: {config.modules}" if config.modules else "no modules")
    if config.skip_roles:
        what.append(f"not timed: {', '.join(config.skip_roles)}")
    if config.export:
        what.append(f"exports: {config.export}")
    yield Check("variables", "ok", "; ".join(what))


def _launcher(environment: Mapping[str, str]) -> Check:
    position = launchers.position(environment)
    if position is None:
        return Check("launcher", "ok", "none here: rank and size come from torch.distributed or the job's launcher")
    return Check("launcher", "ok", f"rank {position.rank} of {position.world_size}")


def _directory(config: Config, environment: Mapping[str, str]) -> Iterator[Check]:
    directory = identity.directory(config, config.run_id or "RUN_ID")
    folder = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".commtrace-doctor-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Check(
            "directory", "problem", f"{directory}: {folder} cannot be written: {error.strerror}",
            "Set COMMTRACE_DIR to a directory that the job's user can write on every node.",
        )  # fmt: skip
        return
    text = f"{directory}: can be written, {free / 1e9:.0f} GB free"
    if free < _LITTLE_SPACE and not config.keep_bytes:
        yield Check("directory", "note", text, "COMMTRACE_KEEP_BYTES bounds what each rank keeps.")
    else:
        yield Check("directory", "ok", text)


def _exporters(config: Config) -> Iterator[Check]:
    names = config.export.split(",") if config.export else []
    if "prometheus" in names and not config.prometheus.textfile:
        port = config.prometheus.port
        try:
            with socket.create_server((config.prometheus.address, port)):
                text = f"{config.prometheus.address}:{port or 'a free port'} can be listened on"
            yield Check("prometheus", "ok", text)
        except OSError as error:
            yield Check(
                "prometheus", "problem", f"{config.prometheus.address}:{port}: {_reason(error)}",
                "Set COMMTRACE_PROMETHEUS_PORT to another port, or to 0 for a free one.",
            )  # fmt: skip
    if "prometheus" in names and config.prometheus.textfile and not os.access(config.prometheus.textfile, os.W_OK):
        yield Check("prometheus", "problem", f"{config.prometheus.textfile} cannot be written")
    if "monitor" in names and config.monitor.store:
        yield from _monitor(config)
    if "otlp" in names and not config.otlp.file:
        yield from _otlp()


def _monitor(config: Config) -> Iterator[Check]:
    address = Address.parse(config.monitor.store)
    yield _reached("monitor", address.host, address.port, "Start it: commtrace monitor HOST:PORT")
    if not config.monitor.token:
        try:
            read_token(token_path())
        except ConfigurationError as error:
            yield Check("monitor", "problem", str(error))


def _otlp() -> Iterator[Check]:
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        yield Check("otlp", "problem", "opentelemetry-sdk is not installed", "pip install 'commtrace[otlp]'")
        return
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.hostname is None:
        yield Check("otlp", "problem", f"OTEL_EXPORTER_OTLP_ENDPOINT is no URL: {redacted_url(endpoint)}")
        return
    yield _reached("otlp", parts.hostname, port, "Start a collector, or set OTEL_EXPORTER_OTLP_ENDPOINT.")


def _reached(subject: str, host: str, port: int, advice: str) -> Check:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return Check(subject, "ok", f"{host}:{port} answers")
    except OSError as error:
        return Check(subject, "note", f"{host}:{port} cannot be reached from here: {_reason(error)}", advice)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


def _clocks() -> Iterator[Check]:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    with contextlib.suppress(OSError):
        name = source.read_text().strip()
        if name in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"):
            yield Check("clock", "ok", f"{name}; clocks of several hosts are fitted from the communication")
        else:
            yield Check("clock", "note", f"{name}: reading the time may be slow, which makes recording dearer")


def _device() -> Iterator[Check]:
    if importlib.util.find_spec("pynvml") is not None:
        yield Check("device state", "ok", "nvidia-ml-py is installed: clocks, temperature and throttling are recorded")
    elif shutil.which("nvidia-smi"):
        yield Check(
            "device state", "note", "clocks, temperature and throttling are not recorded", "pip install nvidia-ml-py"
        )


def _bypasses() -> Iterator[Check]:
    for module, name in _BYPASSES.items():
        if importlib.util.find_spec(module) is not None:
            yield Check("not visible", "note", f"{name}, if the job uses it: it does not pass torch.distributed")


_PROGRAM: Final = """
import json, sys, tempfile
import commtrace, torch
import torch.distributed as dist

commtrace.start(commtrace.Config(dir=sys.argv[1], run_id="doctor", engine=sys.argv[2]))
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for step in range(2):
        with commtrace.step(step):
            dist.all_reduce(torch.ones(4))
            dist.barrier()
    dist.destroy_process_group()
commtrace.stop()
devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "backends": [name for name in ("nccl", "gloo", "mpi", "ucc") if dist.is_backend_available(name)],
    "devices": [torch.cuda.get_device_name(number) for number in range(devices)],
}))
"""
_EXPECTED: Final = {"step": 2, "collective": 4}


def try_recording(
    environment: Mapping[str, str], seconds: float = _SECONDS, *, config: Config | None = None
) -> list[Check]:
    """Record four calls of one rank in a process of its own, within ``seconds``, and read them.

    Of ``config`` only the engine counts: the recording is small and local whatever the job is.
    """
    # Without the variables of commtrace and of launchers.
    own = {name: value for name, value in environment.items() if not _belongs_to_a_job(name)}
    with tempfile.TemporaryDirectory(prefix="commtrace-doctor-") as folder:
        command = [sys.executable, "-c", _PROGRAM, folder, (config or Config()).engine]
        try:
            ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return [Check("recording", "problem", f"a recording of four calls did not end within {seconds:g} s")]
        said = ended.stderr.strip().splitlines()
        if ended.returncode:
            reason = said[-1] if said else f"exit code {ended.returncode}"
            return [Check("recording", "problem", f"a recording of four calls failed: {reason}")]
        facts = json.loads(ended.stdout.splitlines()[-1])
        try:
            kinds = commtrace.open(folder, tables="arrow").spans().column("kind").to_pylist()
            engines = engines_used(load_run(folder))
        except CommtraceError as error:
            return [Check("recording", "problem", f"nothing was recorded: {error}", "\n".join(said[-5:]))]
    found = {kind: kinds.count(kind) for kind in _EXPECTED}
    if found != _EXPECTED:
        return [Check("recording", "problem", f"recorded {json.dumps(found)} of {json.dumps(_EXPECTED)}")]
    devices = Counter(facts["devices"])
    listed = ", ".join(f"{count} × {name}" for name, count in devices.items()) or "none: times are those of the host"
    checks = [Check("devices", "ok", f"{listed}; backends: {', '.join(facts['backends'])}")]
    reasons = [used.reason for used in engines if used.reason]
    if devices and reasons:
        checks.append(Check("engine", "note", f"Python: {COST}", f"Why not the native one: {reasons[0]}"))
    by_engine = engine_words(engines, with_reason=False)
    text = f"4 of 4 calls and 2 of 2 steps of a process group were recorded and read; engine: {by_engine}"
    return [*checks, Check("recording", "ok", text)]


def _belongs_to_a_job(name: str) -> bool:
    return name.startswith(("COMMTRACE_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "PYTHON_COMMTRACE")) or name in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    )  # fmt: skip
