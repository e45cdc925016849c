"""Has numpy sort with AVX2 on processors whose AVX-512 sorts slowly.

Zen 4 has AVX-512, but carries out its compressing stores as microcode, and numpy's AVX-512 sorts consist of them: a
million 64-bit integers took 51 ms, and 12 ms with AVX2 (numpy 2; numpy 1.26 has no AVX2 sort and gains a tenth). Sorts
are most of what joins the communications of ranks. Reported as issue 6 of numpy/x86-simd-sort; OpenJDK leaves the same
sorts out on the same processors (JDK-8317976).
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_DISABLE: Final = "NPY_DISABLE_CPU_FEATURES"
_ENABLE: Final = "NPY_ENABLE_CPU_FEATURES"
"""numpy refuses to be imported where both are set."""

_AVX512: Final = "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
"""Under the names of numpy from 2.4 on, and of earlier ones."""

_LIBRARIES: Final = "numpy.libs"
"""What comes beside numpy in its wheels on PyPI, and in no other build."""

_CPUINFO: Final = Path("/proc/cpuinfo")
_ZEN_3_AND_4: Final = "25"
"""Family of AMD's processors; of the two, only Zen 4 has AVX-512."""


def avoid_slow_sorts(cpuinfo: Path = _CPUINFO) -> None:
    """Must be called before numpy is imported. Who has set one of numpy's variables knows better."""
    if _DISABLE in os.environ or _ENABLE in os.environ:
        return
    if not _sorts_slowly_with_avx512(cpuinfo) or not _is_wheel_of_pypi():
        return
    os.environ[_DISABLE] = _AVX512
    # numpy warns of names that are those of another of its versions.
    warnings.filterwarnings("ignore", "During parsing environment variable", ImportWarning)


def _sorts_slowly_with_avx512(cpuinfo: Path) -> bool:
    told = _first_processor(cpuinfo)
    is_family = told.get("vendor_id") == "AuthenticAMD" and told.get("cpu family") == _ZEN_3_AND_4
    return is_family and "avx512f" in told.get("flags", "").split()


def _is_wheel_of_pypi() -> bool:
    """numpy refuses to be imported without what it was built to need; what it takes from PyPI needs no AVX-512."""
    found = find_spec("numpy")
    return (
        found is not None and found.origin is not None and Path(found.origin).parents[1].joinpath(_LIBRARIES).is_dir()
    )


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """What the system tells of the first one; nothing where it is not Linux."""
    told: dict[str, str] = {}
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                told[name.strip()] = value.strip()
    except (OSError, UnicodeDecodeError):
        return {}
    return told
