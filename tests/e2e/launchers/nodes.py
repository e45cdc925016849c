"""Machines for launchers to launch on: Linux namespaces with a host name, an address and a disk of their own.

>>> with nodes(Path("/tmp/cluster"), count=2) as (first, second):                     # doctest: +SKIP
...     first.run(["ping", "-c", "1", second.name])

Each node is a process in a network, host-name, mount and PID namespace of its own, plugged into a bridge in a further
namespace. Nothing is named outside of them and no file of this machine is changed. The nodes end with the process that
holds them, and that one ends with pytest, so that neither a failed test nor a killed one leaves anything behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.e2e.launch import REPOSITORY, Completed, run

PROGRAMS: Final = ("unshare", "nsenter", "setpriv", "ip", "tc", "mount")
_NETWORK: Final = "10.77.0."
_SECONDS_TO_START: Final = 60.0
_UNSHARE: Final = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child=KILL")
"""unshare(1) makes the mounts of the new namespace private, so that none is seen outside."""


@dataclass(frozen=True)
class Node:
    """One machine.

    Attributes:
        name: its host name, which all nodes resolve.
        address: on the network of the nodes.
        disk: a directory at the same path on every node, with other files on each.
        pid: its first process, as this machine sees it.
    """

    name: str
    address: str
    disk: Path
    pid: int

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs ``command`` on this node."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", f"--wdns={REPOSITORY}", "--"]
        return [*inside, *map(str, command)]

    def run(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = 60.0
    ) -> Completed:
        """Run ``command`` here to its end, or for ``timeout`` seconds."""
        return run(self.command(command), env, timeout)

    def check(self, command: Sequence[str | Path], timeout: float = 20.0) -> str:
        """Run ``command`` here and return what it printed; it has to succeed."""
        completed = self.run(command, timeout=timeout)
        assert completed.returncode == 0, f"{self.name}: {' '.join(map(str, command))}\n{completed.stdout}"
        return completed.stdout

    def limit(self, megabits_per_second: int) -> None:
        """Let no more than this leave the node: through a token bucket, before the other side of the link."""
        rate, burst = f"{megabits_per_second}mbit", "64kb"
        self.check(["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", burst,
                    "latency", "100ms"])  # fmt: skip

    def unlimit(self) -> None:
        """Take the limit away again."""
        self.check(["tc", "qdisc", "del", "dev", "eth0", "root"])


def why_none() -> str:
    """Return why no nodes can be made on this machine; empty if they can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", "mount -t proc proc /proc && ip link add br0 type bridge"],
        capture_output=True,
        text=True,
        timeout=_SECONDS_TO_START,
    )
    return f"no namespaces with a bridge: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def nodes(directory: Path, count: int) -> Iterator[list[Node]]:
    """Yield ``count`` nodes, node0 first, which share all files but those below ``directory / "disk"``."""
    names = [f"node{number}" for number in range(count)]
    addresses = [f"{_NETWORK}{number + 1}" for number in range(count)]
    (directory / "disk").mkdir(parents=True)
    hosts = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    (directory / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    with ExitStack() as holders:
        switch = holders.enter_context(_namespace("exec sleep infinity"))
        _in_network(switch, "ip link add br0 type bridge && ip link set br0 up")
        made = []
        for name, address in zip(names, addresses, strict=True):
            pid = holders.enter_context(_namespace(_boot_script(directory, name)))
            made.append(Node(name, address, directory / "disk", pid))
            _in_network(
                switch,
                f"ip link add {name} type veth peer name eth0 netns {pid} && ip link set {name} master br0 up",
            )
            _in_network(pid, f"ip link set lo up && ip addr add {address}/24 dev eth0 && ip link set eth0 up")
        yield made


def _boot_script(directory: Path, name: str) -> str:
    """What a node's first process does before it waits.

    A boot id of its own, because ranks of one boot share a clock. /run is where daemons put their sockets and locks.
    """
    own = directory / "disks" / name
    own.mkdir(parents=True)
    (directory / f"{name}.boot_id").write_text(f"00000000-0000-4000-8000-{name.encode().hex():>012}\n")
    return " && ".join(
        [
            "mount -t proc proc /proc",
            f"mount --bind {directory / f'{name}.boot_id'} /proc/sys/kernel/random/boot_id",
            f"mount --bind {directory / 'hosts'} /etc/hosts",
            f"mount --bind {own} {directory / 'disk'}",
            "mount -t tmpfs tmpfs /run",
            f"echo {name} > /proc/sys/kernel/hostname",
            "exec sleep infinity",
        ]
    )


@contextmanager
def _namespace(script: str) -> Iterator[int]:
    """Yield the PID of a shell that executes ``script`` as the first process of its namespaces.

    When ``unshare`` ends, for whatever reason, the kernel kills this process, and with it all others of its namespace.
    """
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = _child_that_sleeps(holder)
        try:
            yield first
        finally:
            os.kill(first, signal.SIGKILL)
            holder.wait(_SECONDS_TO_START)
    finally:
        holder.kill()
        holder.communicate()


def _child_that_sleeps(holder: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and holder.poll() is None:
        for child in Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text() == "sleep\n":
                return int(child)
        time.sleep(0.01)
    holder.kill()
    raise RuntimeError(f"a node did not start: {holder.communicate()[1]}")


def _in_network(pid: int, script: str) -> None:
    subprocess.run(["nsenter", f"--target={pid}", "--net", "sh", "-c", script], check=True, timeout=_SECONDS_TO_START)
