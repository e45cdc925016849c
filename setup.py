"""Builds from an empty folder, and only where the symlinks of the checkout are whole; pyproject.toml has the rest."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGES = Path(__file__).resolve().parent / "commtrace"
MISSING = [name for name in ("exporters", "integrations", "viewer") if not (PACKAGES / name / "__init__.py").is_file()]

if MISSING:
    raise SystemExit(
        f"commtrace/{MISSING[0]} is no folder: it is a symlink, and this copy of the sources was made without them. "
        "Clone again with 'git clone -c core.symlinks=true', or copy with what keeps symlinks (tar, rsync -a)."
    )


class BuildIntoEmptyFolder(build_py):
    """Leave out what an earlier build left: modules that are gone since would get into the wheel, and hide new ones."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": BuildIntoEmptyFolder})
