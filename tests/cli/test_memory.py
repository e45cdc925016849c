from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli import main
from commtrace.cli.main import COMMANDS, app

_TOUCHED = """
import resource, sys
if sys.argv[1] == "kept":
    from commtrace.cli.memory import keep_freed_memory
    keep_freed_memory()
import numpy
[numpy.ones(300_000) for _ in range(50)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    [numpy.ones(300_000) for _ in range(50)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _pages_touched(how: str) -> int:
    told = subprocess.run([sys.executable, "-c", _TOUCHED, how], capture_output=True, check=True, text=True, timeout=60)
    return int(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_columns_take_the_memory_of_those_before() -> None:
    assert _pages_touched("kept") < 1_000 < _pages_touched("not kept")


def test_only_commands_that_start_no_training_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    for name in COMMANDS:
        monkeypatch.setattr(main, "prepare_for_analysis", lambda _, name=name: kept.append(name))
        CliRunner().invoke(app, [name, "--help"])

    assert {"summary", "top"} <= set(kept)
    assert not {"run", "bench", "monitor", "trigger"} & set(kept)


def test_memory_is_set_up_before_numpy_reads_its_settings() -> None:
    code = "import commtrace.cli.main, sys; sys.exit(bool({'numpy', 'pyarrow'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


_HUGE = """
from commtrace.cli.memory import keep_freed_memory
keep_freed_memory()
import numpy
def told(what):
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith(what))
resident = told("Rss")
columns = [numpy.ones(300_000) for _ in range(100)]
print(resident, told("AnonHugePages"))
"""


def _backs_with_huge_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
@pytest.mark.skipif(not _backs_with_huge_pages(), reason="this system has no transparent huge pages")
def test_many_columns_lie_in_huge_pages_and_what_is_reserved_is_not_touched() -> None:
    told = subprocess.run([sys.executable, "-c", _HUGE], capture_output=True, check=True, text=True, timeout=60)
    resident_kib, huge_kib = map(int, told.stdout.split())

    assert resident_kib < 200_000
    assert huge_kib > 100 * 300_000 * 8 // 1024 // 2  # Where memory is in small pieces, the kernel gives fewer.
