from __future__ import annotations

import importlib.metadata
import inspect

import commtrace


def test_the_surface_is_small_sorted_and_there() -> None:
    assert commtrace.__all__ == sorted(commtrace.__all__)
    assert len(commtrace.__all__) <= 10
    assert all(hasattr(commtrace, name) for name in commtrace.__all__)


def test_nothing_else_is_public_but_modules() -> None:
    public = {
        name for name, value in vars(commtrace).items() if not name.startswith("_") and not inspect.ismodule(value)
    }

    assert public <= set(commtrace.__all__)


def test_every_public_name_is_documented() -> None:
    undocumented = [
        name for name in commtrace.__all__ if name != "__version__" and not getattr(commtrace, name).__doc__
    ]

    assert undocumented == []


def test_the_version_is_reported_once() -> None:
    assert importlib.metadata.version("commtrace") == commtrace.__version__


def test_errors_for_users_have_one_root() -> None:
    from commtrace import errors

    raised = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert all(issubclass(error, commtrace.CommtraceError) for error in raised)
    of_imports = {errors.MissingExtraError, errors.InstallationError}
    others = {commtrace.CommtraceError, *of_imports}
    assert all(issubclass(error, ValueError) for error in raised if error not in others)
    assert all(issubclass(error, ImportError) for error in of_imports)
