"""Start commtrace in processes that import torch; ``commtrace run`` puts this folder first on PYTHONPATH.

Every Python below the command executes this file at start-up, also those that are too old for commtrace (3.8 is tried).
So it imports next to nothing, and nothing of it raises into the import of torch.
``commtrace bench overhead`` sets ``_COMMTRACE_STAMPS``, to have the same clocks with and without commtrace.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

TYPE_CHECKING = False  # typing's, without the import of typing
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
"""Scripts and modules that import torch and train only in processes of their own, which come by here themselves."""

_FOLDER = os.path.dirname(os.path.abspath(__file__))


# In the place of wrapt, whose import would cost each of these processes more than Python's own start.
class _TorchFinder:
    """Find torch as the other finders do, and have commtrace started once torch has executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":  # not torch.distributed, which torch imports half-way through its own import
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            try:
                self._start_after(spec.loader)
            except Exception as error:  # its attributes cannot be set
                _report(error)
        return spec

    def _start_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            # Only now: libraries look a module up only to see if it is there.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _start()

        loader.exec_module = exec_module


def _is_launcher() -> bool:
    # By the command of Python: sys.argv is not complete yet, and a spawned process has that of its parent. It is not
    # known before Python 3.10, for which commtrace cannot be installed.
    words = iter(getattr(sys, "orig_argv", [])[1:])
    for word in words:
        if word.startswith("-") and word.endswith("m"):  # also -um
            return next(words, "") in _LAUNCHERS
        if word in ("-X", "-W"):
            next(words, None)  # their value
        elif not word.startswith("-"):
            return os.path.basename(word) in _LAUNCHERS
    return False


def _start() -> None:
    try:
        if _is_launcher():
            return
        stamps = os.environ.get("_COMMTRACE_STAMPS")
        if stamps:
            _stamp_steps(stamps)
        if "_COMMTRACE_ONLY_STAMPS" not in os.environ:
            import commtrace.auto  # noqa: F401
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    missing = isinstance(error, ModuleNotFoundError)
    hint = f" Install it there: {sys.executable} -m pip install commtrace" if missing else ""
    problem = f"commtrace: nothing is recorded in process {os.getpid()}: {type(error).__name__}: {error}."
    try:
        print(problem + hint, file=sys.stderr)
    except Exception:
        return  # a closed stderr: there is nobody to tell


def _stamp_steps(folder: str) -> None:
    """Write a JSON file when the process ends: for each optimizer step its id, wall clock and CPU time, in ns."""
    import atexit
    import time

    from torch.optim.optimizer import register_optimizer_step_post_hook

    stamps: list[tuple[int, int, int]] = []
    wall, cpu, pid = time.monotonic_ns, time.process_time_ns, os.getpid()

    def stepped(optimizer: object, _arguments: object, _keywords: object) -> None:
        stamps.append((id(optimizer), wall(), cpu()))

    def write() -> None:
        if not stamps or os.getpid() != pid:
            return
        import json
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        report = {"rank": int(os.environ.get("RANK", "0")), "max_rss_bytes": used.ru_maxrss * 1024, "stamps": stamps}
        with open(os.path.join(folder, f"{pid}.json"), "w") as file:
            json.dump(report, file)

    register_optimizer_step_post_hook(stepped)
    atexit.register(write)


def _execute_the_hidden_sitecustomize() -> None:
    """Execute the sitecustomize that this file hides: Python executes only the first one of sys.path."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _TorchFinder())
# Last, and unguarded: if it raises, Python reports it and goes on, exactly as it does without commtrace.
_execute_the_hidden_sitecustomize()
