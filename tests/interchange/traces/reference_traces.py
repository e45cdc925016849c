"""Traces of others, which are fetched where they may be."""

from __future__ import annotations

from pathlib import Path

from tests.reference import reference_data


def dlrm() -> list[Path]:
    return sorted(reference_data("kineto", "dlrm_8ranks").glob("*.json.gz"))
