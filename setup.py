"""Builds from an empty folder, and only where the symlinks of the checkout are whole; pyproject.toml has the rest.

The extension commtrace._native.core is built where there are a C compiler and the headers of Python, and left out
elsewhere: commtrace then records with its Python engine. BUILD_COMMTRACE_NATIVE=1 makes a failed build of it an error,
BUILD_COMMTRACE_NATIVE=0 leaves it out. (Not COMMTRACE_…: those variables are options of the recorder.)
"""

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGES = ROOT / "commtrace"
MISSING = [name for name in ("exporters", "integrations", "viewer") if not (PACKAGES / name / "__init__.py").is_file()]

if MISSING:
    raise SystemExit(
        f"commtrace/{MISSING[0]} is no folder: it is a symlink, and this copy of the sources was made without them. "
        "Clone again with 'git clone -c core.symlinks=true', or copy with what keeps symlinks (tar, rsync -a)."
    )

CHOICE = os.environ.get("BUILD_COMMTRACE_NATIVE", "")
if CHOICE not in ("", "0", "1"):
    raise SystemExit(f"BUILD_COMMTRACE_NATIVE={CHOICE}: write 1 (it must be built), 0 (leave it out), or unset it")


def sources(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (PACKAGES / "_native").glob(pattern))


NATIVE = Extension(
    "commtrace._native.core",
    sources("*.c"),
    depends=sources("*.h"),
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    # -fvisibility: nothing but PyInit_core is seen by other libraries of the process.
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
    libraries=["dl", "m"],
    optional=CHOICE != "1",
)


def extensions() -> list[Extension]:
    # Free-threaded Pythons have no limited API before 3.15.
    if CHOICE == "0" or (sysconfig.get_config_var("Py_GIL_DISABLED") and CHOICE != "1"):
        return []
    return [NATIVE]


class BuildIntoEmptyFolder(build_py):
    """Leave out what an earlier build left: modules that are gone since would get into the wheel, and hide new ones."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class TagByContent(bdist_wheel):
    """Tag the wheel by what is in it: for this platform with the extension, for any one without."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build")
        if any(Path(name).is_file() for name in self.get_finalized_command("build_ext").get_outputs()):
            self.py_limited_api = "cp310"
        else:
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


setup(ext_modules=extensions(), cmdclass={"build_py": BuildIntoEmptyFolder, "bdist_wheel": TagByContent})
