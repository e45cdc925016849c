"""An sshd on every node, and keys with which root gets from each to each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.e2e.launchers.nodes import Node

PROGRAMS: Final = ("ssh", "ssh-keygen", "sshd")

_SERVER = """
HostKey {directory}/key
AuthorizedKeysFile {directory}/key.pub
PidFile none
StrictModes no
PermitRootLogin prohibit-password
UsePAM no
"""

_CLIENT = """
Host *
    IdentityFile {directory}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


def start_sshd(directory: Path, nodes: Sequence[Node]) -> None:
    """Let ``ssh NODE`` work on all nodes. The daemons end with the nodes.

    The client's settings lie over /etc/ssh/ssh_config in the nodes' own view of the files: ssh looks nowhere below
    $HOME, and a launcher that starts ssh by itself needs no option.
    """
    nodes[0].check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "key"])
    (directory / "sshd_config").write_text(_SERVER.format(directory=directory))
    (directory / "ssh_config").write_text(_CLIENT.format(directory=directory))
    program = shutil.which("sshd")
    assert program is not None
    for node in nodes:
        node.check(["mount", "--bind", directory / "ssh_config", "/etc/ssh/ssh_config"])
        node.check(["mkdir", "-p", "/run/sshd"])
        node.check([program, "-f", directory / "sshd_config"])


def why_none() -> str:
    """Return why there can be no ssh here; empty if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(missing)} missing: apt-get install openssh-server openssh-client" if missing else ""
