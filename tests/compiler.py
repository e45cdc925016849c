"""Whether C can be compiled here, with the headers of Python."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Final

import pytest

HAS_COMPILER: Final = shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()

needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="there is no C compiler (cc), or no Python.h (python3-dev)"
)
