"""Who this process is: everything that goes into :class:`~commtrace.trace.metadata.RankMetadata`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from commtrace.config import Config
from commtrace.trace.metadata import ClockAnchor, RankMetadata

_PACKAGES: Final = (
    "commtrace", "torch", "megatron-core", "deepspeed", "transformer-engine", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_ENVIRONMENT_PREFIXES: Final = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
"""Settings that change timings. Nothing else of the environment is stored: it holds secrets."""

_START_FIELD: Final = 19
"""Of /proc/PID/stat, counted from behind the name: start time in clock ticks since boot (field 22 of proc(5))."""

_logger = logging.getLogger("commtrace")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def collect(config: Config, run_id: str) -> RankMetadata:
    """Read the rank's identity from torch.distributed if it is initialised, else from the launcher's variables."""
    rank, world_size, backend = _position()
    device_name, device_uuid = device()
    host = socket.gethostname()
    return RankMetadata(
        run_id=run_id,
        attempt=attempt(),
        session=time.time_ns(),
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK") or 0),
        world_size=world_size,
        host=host,
        node=config.node_id or host,
        boot_id=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
        pid=os.getpid(),
        backend=backend,
        device=device_name,
        device_uuid=device_uuid,
        versions=_versions(),
        environment={name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT_PREFIXES)},
        anchor=clock_anchor(),
    )


def attempt(environment: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has restarted the job."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get("SLURM_RESTART_COUNT") or 0)


def run_id(config: Config, environment: Mapping[str, str] = os.environ) -> str:
    """A name for the run that all its ranks find without talking to each other; empty if they cannot.

    It comes from COMMTRACE_RUN_ID, the name that Megatron's own telemetry was given, torchrun's ``--rdzv-id`` or
    Slurm. Where all ranks are on one node, their launcher's process is what they have in common. Several nodes without
    any of these: see :func:`agreed_run_id`.
    """
    launcher = environment.get("TORCHELASTIC_RUN_ID", "")
    named = config.run_id or environment.get("MEGATRON_OTEL_RUN_ID") or environment.get("NEMO_LENS_RUN_ID")
    if named:
        return named
    if launcher and launcher != "none":
        return launcher
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}"
    world_size = environment.get("WORLD_SIZE", "1")
    if environment.get("LOCAL_WORLD_SIZE", world_size) != world_size:
        return ""
    launched = "RANK" in environment or multiprocessing.parent_process() is not None
    return _name_of_process(os.getppid() if launched else os.getpid())


def agreed_run_id() -> str:
    """A name for the run on which its ranks agree through the job's own store: one request of each rank, no waiting.

    Empty where there is no store. Not for the training thread.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return ""
    try:
        store = distributed._get_default_store()
        return str(store.compare_set("commtrace/run_id", "", _name_of_process(os.getpid())).decode())
    except (RuntimeError, NotImplementedError) as error:
        _logger.warning(
            "commtrace: the nodes could not agree on a name for this run (%s); set COMMTRACE_RUN_ID to the same value "
            "on all of them, or every node's ranks will look like a run of their own",
            error,
        )
        return ""


def _name_of_process(pid: int) -> str:
    """The process's start and number: the same whenever and by whomever of the host it is asked."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        started = int(boot.split()[1]) + int(after_name[_START_FIELD]) // os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return f"process-{pid}"  # not Linux
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started))}-{pid}"


def clock_anchor(tries: int = 5) -> ClockAnchor:
    """The monotonic clock against the wall clock: of a few readings, the one taken in the shortest time."""
    best = None
    for _ in range(tries):
        before = time.monotonic_ns()
        realtime = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best.bracket_ns:
            best = ClockAnchor((before + after) // 2, realtime, after - before)
    assert best is not None
    return best


def _position() -> tuple[int, int, str]:
    """Rank, world size and backend."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), _backend(distributed)
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), ""


def _backend(distributed: Any) -> str:
    """As the script named it; where it named none, what torch chose: ``gloo``, or by device ``cpu:gloo,cuda:nccl``."""
    named = str(distributed.get_backend())
    if named != "undefined":
        return named
    by_device = str(distributed.get_backend_config())
    chosen = {part.rpartition(":")[2] for part in by_device.split(",")}
    return chosen.pop() if len(chosen) == 1 else by_device


def device(number: int | None = None) -> tuple[str, str]:
    """Name and UUID of the accelerator that this process uses, without creating a context on one.

    Args:
        number: which it is, if that is known. torch's current device does not tell: it is that of the calling thread,
            and the thread that asks is not the one that trains.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used = _device_in_use(torch) if number is None else number
        if used is not None:
            properties = torch.cuda.get_device_properties(used)
            return str(properties.name), str(getattr(properties, "uuid", ""))
    return platform.machine() + " cpu", ""


def _device_in_use(torch: Any) -> int | None:
    """Of the devices on which this process has a context, the one that is its own by its local rank, else the first."""
    in_use = [number for number in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(number)]
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    return local_rank if local_rank in in_use else next(iter(in_use), None)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch: Any = sys.modules.get("torch")
    if torch is not None and getattr(torch.version, "cuda", None):
        found["cuda"] = str(torch.version.cuda)
    return found
