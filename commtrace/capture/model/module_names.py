"""Names of the modules of a process, without wrappers.

The models are found by asking Python's garbage collector for all modules and keeping those that no other module
holds: no framework has to be known and no constructor hooked. What wraps a model without being one (DDP, FSDP, a
compiled module, a checkpoint wrapper, Megatron's Float16Module, DeepSpeed's engine) is left out of the names.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

PART: Final = "capture of modules"

_WRAPPED: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Names by which wrappers hold the one module that they wrap."""


class Placed(NamedTuple):
    """A module in its model.

    Attributes:
        name: ``decoder.layers.3``; the class for the outermost module of a model. Where a process has models of
            several classes, the names of all but the largest begin with their class.
        depth: inside how many other modules it is called.
        modules: the module, and before it what wraps it, outermost first.
    """

    name: str
    depth: int
    modules: tuple[Any, ...]


def find_models() -> list[Any]:
    """Return every module that is not part of another one; those with the most parts first. ~0.1 s for a million
    objects.
    """
    import torch

    # Not isinstance: that would run code of lazy and deprecated objects.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    whole = [module for module in found if isinstance(module.__dict__.get("_modules"), dict)]
    parts = {id(child) for module in whole for child in _children(module).values()}
    models = [module for module in whole if id(module) not in parts and not _is_script(module)]
    return sorted(models, key=lambda model: -sum(1 for _ in model.modules()))


def placed_modules(models: list[Any]) -> Iterator[Placed]:
    """Yield all modules of these models that are called; containers (``ModuleList``, ``ModuleDict``) are not."""
    seen: set[int] = set()
    main = type(_unwrapped(models[0])[-1]) if models else None
    for model in models:
        own = type(_unwrapped(model)[-1])
        yield from _below(model, own.__name__, "" if own is main else f"{own.__name__}.", 0, seen)


def _below(module: Any, name: str, prefix: str, depth: int, seen: set[int]) -> Iterator[Placed]:
    if id(module) in seen or _is_script(module):
        return  # shared: it has the name under which it was met first
    chain = _unwrapped(module)
    seen.update(map(id, chain))
    is_called = not _is_container(chain[-1])
    if is_called:
        yield Placed(name, depth, chain)
    for child_name, child in _children(chain[-1]).items():
        full_name = f"{prefix}{child_name}"
        yield from _below(child, full_name, f"{full_name}.", depth + is_called, seen)


def _unwrapped(module: Any) -> tuple[Any, ...]:
    chain = [module]
    while True:
        children = _children(chain[-1])
        if len(children) != 1 or not _WRAPPED.issuperset(children):
            return tuple(chain)
        (inner,) = children.values()
        if inner in chain or _is_script(inner):
            return tuple(chain)
        chain.append(inner)


def _children(module: Any) -> dict[str, Any]:
    return {name: child for name, child in module.__dict__.get("_modules", {}).items() if child is not None}


def _is_container(module: Any) -> bool:
    import torch

    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))


def _is_script(module: Any) -> bool:
    import torch

    return isinstance(module, torch.jit.ScriptModule)
