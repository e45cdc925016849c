"""Where traces and logs of other projects lie, with answers that were computed elsewhere. None of them is ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "REFERENCE_DATA"
"""COMMTRACE_REFERENCE_DATA, of which tests/conftest.py takes off the prefix: jobs would warn of it."""

_BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[2] / "shared" / "data"


def reference_data(*parts: str) -> Path:
    """A file or folder of the reference data; skips the test where it is not there."""
    path = Path(os.environ.get(VARIABLE) or _BESIDE_THE_CHECKOUT).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there: set COMMTRACE_{VARIABLE} to the folder of the reference data")
    return path
