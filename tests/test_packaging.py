"""What a user gets from a package index: built here by what pip calls to build it, without a network."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from commtrace import __version__
from tests.compiler import needs_compiler

DIST_INFO = f"commtrace-{__version__}.dist-info"
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("commtrace", "integrations", "exporters", "viewer")
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({out!r}))"


def _try_to_build(
    kind: str, source: Path, out: Path, changes: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    out.mkdir()
    command = [sys.executable, "-c", BUILD.format(kind=kind, out=str(out))]
    environment = {**os.environ, **(changes or {})}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=200)


def _build(kind: str, source: Path, out: Path, changes: Mapping[str, str] | None = None) -> Path:
    completed = _try_to_build(kind, source, out, changes)
    assert completed.returncode == 0, completed.stderr
    return out / completed.stdout.splitlines()[-1]


def _copy_of_the_checkout(destination: Path) -> None:
    ignored = shutil.ignore_patterns(
        ".git",
        ".venv*",
        ".nox",
        ".*_cache",
        ".hypothesis",
        "__pycache__",
        "*.egg-info",
        "*.so",
        "build",
        "dist",
        "commtrace-runs",
        "node_modules",
    )
    shutil.copytree(ROOT, destination, symlinks=True, ignore=ignored)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    work = tmp_path_factory.mktemp("sdist")
    _copy_of_the_checkout(work / "checkout")
    sdist = _build("sdist", work / "checkout", work / "sdist")
    (work / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", str(sdist), "-C", str(work / "unpacked")], check=True, timeout=60)
    [folder] = (work / "unpacked").iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist: both must be whole for it to be right."""
    work = tmp_path_factory.mktemp("packaging")
    # Left by the build of an earlier version, without the extension and with it.
    for lib in ("lib", f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"):
        earlier = unpacked / "build" / lib / "commtrace" / "gone.py"
        earlier.parent.mkdir(parents=True)
        earlier.touch()
    return _build("wheel", unpacked, work / "wheel")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _shipped_as(path: Path) -> str:
    """Where a file of the checkout is in the wheel: the symlinked folders become packages of commtrace."""
    relative = path.relative_to(ROOT).as_posix()
    return relative if relative.startswith("commtrace/") else f"commtrace/{relative}"


def test_the_sdist_has_what_is_to_be_read_and_no_tests(unpacked: Path) -> None:
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    documents = {f"{folder}/{path.name}" for folder in ("docs", "examples") for path in (ROOT / folder).iterdir()}

    assert {name for name in documents if (ROOT / name).is_file()} <= files
    assert {"README.md", "CHANGELOG.md", "LICENSE", "examples/monitoring/compose.yml"} <= files
    assert not {name for name in files if name.startswith("tests/") or "__pycache__" in name}


def test_the_sdist_has_the_sources_of_the_extension(unpacked: Path) -> None:
    sources = [path for kind in ("*.c", "*.h", "*.pyi") for path in (ROOT / "commtrace" / "_native").glob(kind)]

    assert {"core.c", "core.pyi"} <= {path.name for path in sources}
    assert all((unpacked / path.relative_to(ROOT)).read_bytes() == path.read_bytes() for path in sources)


def test_a_checkout_without_symlinks_is_not_built(tmp_path: Path) -> None:
    """As git makes one where core.symlinks is false: each link is a file that holds its target."""
    checkout = tmp_path / "checkout"
    _copy_of_the_checkout(checkout)
    for name in ("exporters", "integrations", "viewer"):
        link = checkout / "commtrace" / name
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)

    completed = _try_to_build("wheel", checkout, tmp_path / "wheel")

    assert completed.returncode != 0
    assert "commtrace/exporters is no folder: it is a symlink" in completed.stderr
    assert "git clone -c core.symlinks=true" in completed.stderr
    assert not list(tmp_path.glob("wheel/*.whl"))


def test_every_module_is_in_the_wheel(names: set[str]) -> None:
    sources = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    assert {"commtrace/viewer/__init__.py", "commtrace/_inject/sitecustomize.py"} <= set(map(_shipped_as, sources))
    assert {_shipped_as(path) for path in sources} == {name for name in names if name.endswith(".py")}


def test_modules_of_an_earlier_build_are_left_out(names: set[str]) -> None:
    assert "commtrace/gone.py" not in names


def test_the_viewer_finds_its_assets_and_type_checkers_our_types(names: set[str]) -> None:
    assets = {_shipped_as(path) for path in (ROOT / "viewer" / "assets").rglob("*") if path.is_file()}

    assert assets
    assert assets <= names
    assert "commtrace/py.typed" in names


def test_rules_and_dashboards_are_in_the_wheel(names: set[str]) -> None:
    wanted = [path for kind in ("*.yml", "*.json") for path in (ROOT / "exporters").rglob(kind)]

    assert len(wanted) >= 9
    assert set(map(_shipped_as, wanted)) <= names


@needs_compiler
def test_a_wheel_with_the_extension_is_for_this_platform_and_all_later_pythons(wheel: Path, names: set[str]) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")

    assert wheel.name == f"commtrace-{__version__}-cp310-abi3-{platform}.whl"
    assert {name for name in names if name.startswith("commtrace/_native/")} == {
        "commtrace/_native/__init__.py",
        "commtrace/_native/core.abi3.so",
        "commtrace/_native/core.pyi",
    }


@pytest.mark.parametrize("changes", [{"PATH": ""}, {"BUILD_COMMTRACE_NATIVE": "0"}], ids=["no compiler", "left out"])
def test_a_wheel_without_the_extension_is_for_all_platforms(
    unpacked: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    pure = _build("wheel", unpacked, tmp_path / "wheel", changes)

    assert pure.name == f"commtrace-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(pure) as archive:
        assert "Root-Is-Purelib: true" in archive.read(f"{DIST_INFO}/WHEEL").decode()
        assert [name for name in archive.namelist() if name.startswith("commtrace/_native/")] == [
            "commtrace/_native/__init__.py",
            "commtrace/_native/core.pyi",
        ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"BUILD_COMMTRACE_NATIVE": "1", "PATH": ""}, " -c commtrace/_native/"),
        ({"BUILD_COMMTRACE_NATIVE": "yes"}, "BUILD_COMMTRACE_NATIVE=yes: write 1 (it must be built), 0"),
    ],
    ids=["demanded without a compiler", "neither 0 nor 1"],
)
def test_a_build_that_must_have_the_extension_fails_without(
    unpacked: Path, tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    completed = _try_to_build("wheel", unpacked, tmp_path / "wheel", changes)

    assert completed.returncode != 0
    assert reason in completed.stdout + completed.stderr
    assert not list(tmp_path.glob("wheel/*.whl"))


def test_nothing_but_commtrace_is_installed(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"commtrace", DIST_INFO}


def test_the_wheel_has_its_license_versions_and_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{DIST_INFO}/METADATA"))
        entry_points = archive.read(f"{DIST_INFO}/entry_points.txt").decode()

    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted({re.split(r"[<>=; ]", line)[0] for line in required}) == [
        "msgspec", "numpy", "prometheus-client", "pyarrow", "rich", "typer", "wrapt",
    ]  # fmt: skip
    assert sorted(metadata.get_all("Provides-Extra", [])) == [
        "cluster", "deepspeed", "dev", "megatron", "mlflow", "otlp", "pandas", "plan", "plot", "polars", "site", "sql",
        "tensorboard", "wandb",
    ]  # fmt: skip
    assert "commtrace = commtrace.cli.main:main" in entry_points


def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, timeout=200)
    source = (
        "import commtrace, commtrace.exporters, commtrace.integrations, commtrace.viewer\n"
        "print(commtrace.__file__, commtrace.viewer.__file__)\n"
        "from commtrace import _native; core, reason = _native.load(); print(core and core.__file__)\n"
        "from commtrace.cli.main import app; app(['--version'])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )

    extension = f"{target}/commtrace/_native/core.abi3.so" if "abi3" in wheel.name else None
    assert completed.stdout.splitlines() == [
        f"{target}/commtrace/__init__.py {target}/commtrace/viewer/__init__.py",
        str(extension),
        f"commtrace {__version__}",
    ]
