"""The C extension is loaded, or the reason is said why it cannot be."""

from __future__ import annotations

import importlib
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from commtrace import _native
from tests.compiler import HAS_COMPILER

Install = Callable[[str, str], ModuleType]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs the package once more, with a file of this name and text as its extension."""
    monkeypatch.syspath_prepend(str(tmp_path))
    numbers = iter(range(100))

    def as_package(file: str, text: str) -> ModuleType:
        folder = tmp_path / f"installed_{tmp_path.name}_{next(numbers)}"
        folder.mkdir()
        shutil.copy(_native.__file__, folder)
        if file:
            (folder / file).write_text(text)
        return importlib.import_module(folder.name)

    return as_package


def test_it_loads_where_it_was_built() -> None:
    core, reason = _native.load()
    if reason == _native.NOT_BUILT and not HAS_COMPILER:
        pytest.skip("there is no C compiler (cc), or no Python.h (python3-dev)")

    assert core is not None, reason
    assert (core.ABI, reason) == (_native.ABI, "")


def test_an_extension_that_was_not_built_names_what_to_install(install: Install) -> None:
    core, reason = install("", "").load()

    assert core is None
    assert reason.startswith("it was not built when commtrace was installed")
    assert "gcc and python3-dev" in reason


def test_one_of_another_version_is_not_used(install: Install) -> None:
    expected = (None, "it was built for another version of commtrace: reinstall commtrace")

    assert install("core.py", f"ABI = {_native.ABI - 1}").load() == expected
    assert install("core.py", "").load() == expected
    assert install("core.py", f"ABI = {_native.ABI}").load()[1] == ""


def test_a_file_that_no_linker_made_is_not_loaded(install: Install) -> None:
    core, reason = install("core.abi3.so", "not an object file").load()

    assert core is None
    assert reason.startswith("it cannot be loaded: ")
    assert "core.abi3.so" in reason


@pytest.mark.parametrize("raised", ["RuntimeError('out of order')", "ImportError('out of order')"])
def test_an_exception_while_loading_is_the_reason(install: Install, raised: str) -> None:
    assert install("core.py", f"raise {raised}").load() == (None, "it cannot be loaded: out of order")


def test_a_module_that_it_lacks_is_the_reason(install: Install) -> None:
    core, reason = install("core.py", "import no_such_module").load()
    assert (core, reason) == (None, "it cannot be loaded: No module named 'no_such_module'")


def test_it_is_not_tried_without_a_gil(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install("core.py", "raise AssertionError('tried')")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)

    assert package.load() == (None, "this Python has no GIL (free-threaded)")
