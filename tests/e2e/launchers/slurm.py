"""A real Slurm on nodes: munged, slurmctld on the first node, a slurmd on each."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.launch import Completed
from tests.e2e.launchers.nodes import Node

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
_SECONDS_TO_START: Final = 20.0
_CPUS: Final = 4
"""Said to be there: so many ranks may share a node."""

_CONFIGURATION = """
ClusterName=commtrace
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmctldParameters=idle_on_node_suspend
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""
"""A requeued job waits for so long as its credentials may be used, 120 s by default; 5 s are the least."""


class Slurm:
    """A cluster that is up. Its daemons end with the nodes."""

    def __init__(self, directory: Path, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._login = nodes[0]
        self._directory = directory
        self._start()

    def run(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = 90.0
    ) -> Completed:
        """Run ``srun …``, ``sbatch …`` and the like on the login node."""
        configuration = {"SLURM_CONF": str(self._directory / "slurm.conf")}
        return self._login.run(command, {**configuration, **(env or {})}, timeout)

    def await_end(self, job: str, done: Path, timeout: float = 150.0) -> None:
        """Wait until a job has made a file, or has ended otherwise; cancel it if it does neither."""
        deadline = time.monotonic() + timeout
        while not done.exists() and self._is_there(job):
            if time.monotonic() > deadline:
                self.run(["scancel", "--signal=ABRT", job])  # its processes write their stacks
                time.sleep(2)
                self.run(["scancel", job])
                return
            time.sleep(0.3)

    def _is_there(self, job: str) -> bool:
        states = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        return self.run(["squeue", "--noheader", f"--job={job}", "--format=%T"]).stdout.strip() in states

    def _start(self) -> None:
        directory = self._directory
        (directory / "state").mkdir(parents=True)
        lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs={_CPUS} RealMemory=1000" for node in self.nodes]
        configuration = directory / "slurm.conf"
        configuration.write_text(
            _CONFIGURATION.format(controller=self._login.name, directory=directory, nodes="\n".join(lines))
        )
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {name: directory / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}-file={path}" for name, path in files.items() if name != "socket"]
        # --force: the directory is one of pytest's, not /etc/munge
        self._login.check(["munged", "--force", f"--socket={files['socket']}", f"--key-file={key}", *options])
        self._login.check(["slurmctld", "-f", configuration])
        for node in self.nodes:
            node.check(["slurmd", "-f", configuration, "-N", node.name])
        self._await_nodes()

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while True:
            told = self.run(["sinfo", "--noheader", "--Node", "--format=%N %t"]).stdout
            if told.split() == [word for node in self.nodes for word in (node.name, "idle")]:
                return
            assert time.monotonic() < deadline, f"{told}\n{self._logs()}"
            time.sleep(0.2)

    def _logs(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in sorted(self._directory.glob("*.log")))


def why_none() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(missing)} missing: apt-get install slurm-wlm munge" if missing else ""
