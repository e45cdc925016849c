"""The machine and the versions that figures are of."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from tests.e2e.launch import REPOSITORY


def machine() -> dict[str, str]:
    """Return what stands above a table of figures."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "-C", str(REPOSITORY), "rev-parse", "--short=8", "HEAD") or "unknown",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl.version()
        facts |= {
            "GPU": torch.cuda.get_device_name(),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, nccl)),
        }
    return facts


def _output(*command: str) -> str:
    """Return the first line of what a command prints; nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return completed.stdout.strip().partition("\n")[0] if completed.returncode == 0 else ""
