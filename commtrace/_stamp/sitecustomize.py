"""Stamps the optimizer steps of a training process, whether commtrace records it or not.

The clock of an A/B comparison must be the same on both sides and owe nothing to what is compared: one of torch's own
hooks reads two clocks after each ``step`` of an optimizer, and nothing else. What was read is written as JSON at the
end of the process, into the folder that ``_COMMTRACE_STAMPS`` names.

Every Python below the command executes this file at start-up, so it imports next to nothing; see
:mod:`commtrace._inject.sitecustomize`, which does the same for recording.
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

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _TorchFinder:
    """Finds torch as the other finders do, and has the hook registered once torch has executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        # Only those behind: the finder of `commtrace run`, which stands in front, asks this one.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self._stamp_after(spec.loader)
        return spec

    def _stamp_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _stamp_steps(os.environ["_COMMTRACE_STAMPS"])

        loader.exec_module = exec_module


def _stamp_steps(folder: str) -> None:
    import atexit
    import time

    from torch.optim.optimizer import register_optimizer_step_post_hook

    stamps: list[tuple[int, int, int]] = []
    wall, cpu, pid = time.monotonic_ns, time.process_time_ns, os.getpid()

    def stepped(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        stamps.append((id(optimizer), wall(), cpu()))

    def write() -> None:
        if not stamps or os.getpid() != pid:
            return
        import json
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        told = {"rank": int(os.environ.get("RANK", "0")), "max_rss_bytes": used.ru_maxrss * 1024, "stamps": stamps}
        with open(os.path.join(folder, f"{pid}.json"), "w") as file:
            json.dump(told, file)

    register_optimizer_step_post_hook(stepped)
    atexit.register(write)


def _execute_the_hidden_sitecustomize() -> None:
    """Python executes only the first sitecustomize of sys.path: execute the one that this file hides."""
    elsewhere = [entry for entry in sys.path if os.path.basename(os.path.abspath(entry)) not in ("_stamp", "_inject")]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "_COMMTRACE_STAMPS" in os.environ:
    sys.meta_path.insert(sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0, _TorchFinder())
_execute_the_hidden_sitecustomize()
