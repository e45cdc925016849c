"""The tests of the extension once more, with a build of it that finds what C gets wrong without a crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.compiler import needs_compiler

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1_200), needs_compiler]

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_core.py", "test_core_bucket_kernel.py", "test_core_cpp.py", "test_core_engines.py", "test_core_fuzz.py",
    "test_core_load.py", "test_core_resolver.py", "test_core_stamps.py",
)  # fmt: skip
OF_THREADS = "thread or stamps or opened_and_closed or stuck or failure or marks"


def runtime(name: str) -> Path:
    """Return the library of a sanitizer, as gcc has it; skip the test where it is missing."""
    printed = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    library = Path(printed.strip())
    if not library.is_absolute() or not library.is_file():
        pytest.skip(f"the compiler has no {name}")
    return library.resolve()


def built(folder: Path, *flags: str) -> Path:
    """Copy the package, and build its extension with a sanitizer."""
    for name in ("commtrace", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    sources = sorted(map(str, (ROOT / "commtrace/_native").glob("*.c")))
    subprocess.run(
        [
            "cc", "-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fPIC", "-shared", "-pthread", *flags,
            "-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_path('include')}", *sources,
            "-o", str(folder / "commtrace/_native/core.abi3.so"), "-ldl", "-lm",
        ],
        check=True,
    )  # fmt: skip
    return folder


def run(folder: Path, library: Path, *arguments: str, **options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-rs", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    without_randomised_addresses = ["setarch", "-R"] if shutil.which("setarch") else []  # which TSan cannot bear
    environment = {
        **os.environ, "PYTHONPATH": str(folder), "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": f"{library}:{runtime('libstdc++.so.6')}",  # which is loaded too late otherwise, with torch
        "COMMTRACE_TEST_PROGRAMS": "30", **options,
    }  # fmt: skip
    tests = [f"tests/native/{name}" for name in TESTS]
    process = subprocess.run(
        [*without_randomised_addresses, *command, *tests, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1_100,
    )  # fmt: skip
    output = process.stdout + process.stderr
    assert "Sanitizer" not in output, output[-20_000:]
    assert "runtime error" not in output, output[-20_000:]
    assert process.returncode == 0, output[-20_000:]
    assert "the native part" not in output, output[-20_000:]  # a build that does not load skips its tests


def test_memory_is_used_as_it_may_be(tmp_path: Path) -> None:
    library = runtime("libasan.so")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    # Python itself leaks; what is freed is kept for a while, so that memory grows, and no object gets the address of
    # one that has just died.
    chosen = "not memory_behind and not had_its_address"
    run(built(tmp_path, *flags), library, "-k", chosen, ASAN_OPTIONS="detect_leaks=0")


def test_threads_share_nothing_unguarded(tmp_path: Path) -> None:
    library = runtime("libtsan.so")
    options = "ignore_noninstrumented_modules=1:report_signal_unsafe=0"
    run(built(tmp_path, "-fsanitize=thread"), library, "-k", OF_THREADS, TSAN_OPTIONS=options)
