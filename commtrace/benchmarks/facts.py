"""What a rank knows of itself: node, versions, environment, cores, device, and the interface to the others."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from commtrace.benchmarks.device import BenchmarkDevice, nccl_version
from commtrace.recording.identity import stored_settings
from commtrace.trace.metadata import NODE_VARIABLES, SLURM_NODE

_PACKAGES: Final = (
    "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "triton", "transformer-engine", "flash-attn",
    "megatron-core", "deepspeed", "commtrace",
)  # fmt: skip
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR of netdevice(7)
_ANY_PORT: Final = 9  # nothing is sent to it


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank as it describes itself to the others."""

    rank: int
    node: str
    host: str
    address: str  # at which the others reach it
    port: int
    interface: str  # that has the address; empty if none has
    interface_mbits: int  # 0 if the kernel does not say
    versions: dict[str, str]
    environment: dict[str, str]
    missing_interfaces: list[str]  # named in the environment, and not there
    cores: list[int]  # on which it may run
    machine_cores: int
    device: str
    device_id: str  # equal for ranks that share a device; empty on a CPU
    device_cores: list[int]  # those next to the device; empty if not known
    scheduler_node: str = ""  # the node as the scheduler names it; empty if it does not


def collect_facts(rank: int, node: str, master: str, port: int, device: BenchmarkDevice) -> RankFacts:
    """Describe this process.

    Args:
        master: address of rank 0's host; the interface that leads there is the one that counts.
        port: at which this process answers.
    """
    address = _own_address(master)
    interface = next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")
    settings = stored_settings(os.environ)
    return RankFacts(
        rank=rank,
        node=node,
        host=socket.gethostname(),
        address=address,
        port=port,
        interface=interface,
        interface_mbits=_speed(interface),
        versions=_versions(),
        environment={name: value for name, value in settings.items() if name not in NODE_VARIABLES},
        missing_interfaces=list(_missing_interfaces(settings)),
        cores=sorted(os.sched_getaffinity(0)),
        machine_cores=os.cpu_count() or 0,
        device=device.name,
        device_id=device.id,
        device_cores=_device_cores(device.pci),
        scheduler_node=settings.get(SLURM_NODE, ""),
    )


def _own_address(master: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:  # no route: rank 0 will not be reached either, and that is reported
        return "127.0.0.1"


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""  # it has no address of IPv4
    return socket.inet_ntoa(answer[20:24])


def _speed(interface: str) -> int:
    try:
        return max(int(Path("/sys/class/net", interface, "speed").read_text()), 0) if interface else 0
    except (OSError, ValueError):
        return 0  # the loopback and virtual interfaces have none


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    import torch

    if torch.cuda.is_available():
        versions["NCCL"] = nccl_version()
    driver = Path("/sys/module/nvidia/version")
    if driver.exists():
        versions["NVIDIA driver"] = driver.read_text().strip()
    return {**versions, "kernel": os.uname().release}


def _missing_interfaces(settings: dict[str, str]) -> set[str]:
    there = [name for _, name in socket.if_nameindex()]
    missing = set()
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = settings.get(variable, "")
        if value.startswith("^"):  # all but these
            continue
        # NCCL takes beginnings of names, unless they stand behind "="; gloo takes whole names.
        is_exact = value.startswith("=") or variable.startswith("GLOO")
        for name in filter(None, value.removeprefix("=").split(",")):
            if not any(interface == name if is_exact else interface.startswith(name) for interface in there):
                missing.add(f"{variable}={name}")
    return missing


def _device_cores(pci: str) -> list[int]:
    try:
        text = Path("/sys/bus/pci/devices", pci, "local_cpulist").read_text().strip() if pci else ""
    except OSError:
        return []
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
