"""numpy sorts with AVX2 where its AVX-512 sorts are slow, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from commtrace.cli.processor import avoid_slow_sorts

_DISABLE = "NPY_DISABLE_CPU_FEATURES"
_ENABLE = "NPY_ENABLE_CPU_FEATURES"


def _cpuinfo(
    folder: Path, vendor: str = "AuthenticAMD", family: int = 25, flags: str = "fpu avx2 avx512f avx512bw"
) -> Path:
    told = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\nflags\t\t: {flags}\n\n"
    path = folder / "cpuinfo"
    path.write_text(told + "processor\t: 1\nflags\t\t: none\n")
    return path


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (_DISABLE, _ENABLE):
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def numpy_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the folder that numpy lies in, as far as the finder tells: a wheel of PyPI."""
    folder = tmp_path / "site-packages"
    (folder / "numpy.libs").mkdir(parents=True)
    found = SimpleNamespace(origin=str(folder / "numpy" / "__init__.py"))
    monkeypatch.setattr("commtrace.cli.processor.find_spec", lambda _: found)
    return folder


def test_zen_4_sorts_without_avx512(tmp_path: Path) -> None:
    avoid_slow_sorts(_cpuinfo(tmp_path))

    assert {"X86_V4", "AVX512F", "AVX512_SKX"} <= set(os.environ[_DISABLE].split())


@pytest.mark.parametrize(
    "other",
    [
        {"vendor": "GenuineIntel", "family": 6},
        {"family": 26},  # Zen 5
        {"flags": "fpu avx2"},  # Zen 3
    ],
)
def test_other_processors_are_left_alone(tmp_path: Path, other: dict[str, str]) -> None:
    avoid_slow_sorts(_cpuinfo(tmp_path, **other))  # type: ignore[arg-type]

    assert _DISABLE not in os.environ


def test_a_numpy_that_may_need_avx512_is_left_alone(tmp_path: Path, numpy_folder: Path) -> None:
    (numpy_folder / "numpy.libs").rmdir()
    avoid_slow_sorts(_cpuinfo(tmp_path))

    assert _DISABLE not in os.environ


def test_without_the_file_nothing_is_set(tmp_path: Path) -> None:
    avoid_slow_sorts(tmp_path / "cpuinfo")

    assert _DISABLE not in os.environ


@pytest.mark.parametrize("name", [_DISABLE, _ENABLE])
def test_what_the_user_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "FMA3")
    avoid_slow_sorts(_cpuinfo(tmp_path))

    assert [os.environ.get(either) for either in (_DISABLE, _ENABLE)].count("FMA3") == 1
    assert None in [os.environ.get(either) for either in (_DISABLE, _ENABLE)]


_SORTED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from commtrace.cli.processor import avoid_slow_sorts
avoid_slow_sorts(Path(sys.argv[1]))
import numpy
print(*numpy.sort([2, 1]))
"""


def test_numpy_takes_the_names_even_where_warnings_are_errors(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", _SORTED, str(_cpuinfo(tmp_path))]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (told.stdout.split(), told.stderr) == (["1", "2"], "")
