"""The page that is committed is the one that its sources give, and the sources pass their own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "viewer" / "web"
BUILT = ("viewer.js", "viewer.css")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with the packages of their lock file, in a folder of their own."""
    if not shutil.which("npm"):
        pytest.skip("needs npm: apt-get install npm")
    copy = tmp_path_factory.mktemp("viewer") / "web"
    shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules"))
    installed = npm(copy, "ci", "--no-audit", "--no-fund", "--prefer-offline")
    if installed.returncode and any(sign in installed.stderr for sign in ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT")):
        pytest.skip(f"no package registry can be reached: {installed.stderr[-200:]}")
    assert installed.returncode == 0, installed.stderr
    return copy


def npm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CI": "1", "NO_COLOR": "1"}
    return subprocess.run(
        ["npm", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def test_types_and_style(web: Path) -> None:
    done = npm(web, "run", "check")

    assert done.returncode == 0, done.stdout + done.stderr


def test_unit_tests_of_the_sources(web: Path) -> None:
    done = npm(web, "run", "test", "--", "--no-isolate", "--maxWorkers=1")  # making a document for each file is slow

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_committed_page_is_what_its_sources_give(web: Path) -> None:
    done = npm(web, "run", "build")

    assert done.returncode == 0, done.stdout + done.stderr
    for name in BUILT:
        fresh = (web.parent / "assets" / name).read_bytes()
        assert fresh == (ROOT / "viewer" / "assets" / name).read_bytes(), f"{name} is out of date: make web"
