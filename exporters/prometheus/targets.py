"""Target files for Prometheus' ``file_sd_configs``: address and labels of every rank."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from commtrace.live.rank import LiveRank

_EVERYWHERE: Final = ("", "0.0.0.0", "::")
_OF_RANK: Final = re.compile(r"rank-(\d{5,})\.json$")


class TargetFile:
    """The file of one rank.

    Args:
        chosen: directory, perhaps of several runs; empty for one inside the run directory.
        rank: this rank.
    """

    def __init__(self, chosen: str, rank: LiveRank) -> None:
        self.directory = Path(chosen) if chosen else rank.directory / "prometheus"
        self._prefix = f"{file_name(rank.run_id)}-" if chosen else ""
        self.path = self.directory / f"{self._prefix}rank-{rank.rank:05d}.json"
        self._written: Mapping[str, str] | None = None
        if rank.rank == 0:
            self._remove_files_of_more_ranks(rank.metadata.world_size)

    def write(self, target: str, labels: Mapping[str, str]) -> None:
        """Write the file if its content changed.

        Args:
            target: ``host:port``.
            labels: of every series of the rank.
        """
        if labels == self._written:
            return
        self._written = labels
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps([{"targets": [target], "labels": labels}], indent=1) + "\n")

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def _remove_files_of_more_ranks(self, world_size: int) -> None:
        """Remove the files of killed ranks that this launch does not have."""
        for path in self.directory.glob(f"{self._prefix}rank-*.json"):
            match = _OF_RANK.fullmatch(path.name.removeprefix(self._prefix))
            if match and int(match[1]) >= world_size:
                path.unlink(missing_ok=True)


def reachable(address: str, port: int) -> str:
    """Return the ``host:port`` under which others reach this address."""
    host = socket.gethostname() if address in _EVERYWHERE else address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def file_name(run_id: str) -> str:
    """Return a run's name as part of a file's name."""
    return re.sub(r"[^\w.-]", "_", run_id)


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
