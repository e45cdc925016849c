"""Refuses to build where symlinks of the checkout have become something else; pyproject.toml has the rest."""

from pathlib import Path

from setuptools import setup

PACKAGES = Path(__file__).resolve().parent / "commtrace"
MISSING = [name for name in ("exporters", "integrations", "viewer") if not (PACKAGES / name / "__init__.py").is_file()]

if MISSING:
    raise SystemExit(
        f"commtrace/{MISSING[0]} is no folder: it is a symlink, and this copy of the sources was made without them. "
        "Clone again with 'git clone -c core.symlinks=true', or copy with what keeps symlinks (tar, rsync -a)."
    )

setup()
