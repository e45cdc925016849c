"""Capture forward and backward of chosen modules by ``_call_impl`` of their classes, without a line in the script."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from commtrace.capture.hooks import leave_to_python
from commtrace.capture.instances import instances_of
from commtrace.capture.tracer import Tracer
from commtrace.errors import ConfigurationError
from commtrace.recording.compile_safe import wrap_call_impl
from commtrace.trace import schema
from commtrace.trace.selection import ModuleChoice

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger("commtrace")

PART: Final = "capture of modules"

_WRAPPED: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Names by which wrappers (DDP, FSDP, a compiled module, Megatron's Float16Module, …) hold the one module that they
wrap.
"""


class ModuleSelection:
    """Switch the capture of modules between steps: the configured ones, and others while a trigger asks for them."""

    def __init__(self, tracer: Tracer, configured: str = "") -> None:
        if configured:
            ModuleChoice.parse(configured)
        self._tracer = tracer
        self._configured = configured
        self._spans: ModuleSpans | None = None

    def install(self) -> None:
        if self._configured:
            self.select(self._configured)

    def select(self, spec: str) -> None:
        """Record the modules of ``spec``, e.g. ``depth=2``, instead; raise ConfigurationError if it cannot be read."""
        if self._spans is None:
            self._spans = ModuleSpans(self._tracer)
        self._spans.select(spec)

    def clear(self) -> None:
        """Record the configured modules again, or none."""
        if self._configured:
            self.select(self._configured)
        else:
            self.uninstall()

    def uninstall(self) -> None:
        if self._spans is not None:
            self._spans.clear()


class Label:
    """The names under which the calls of one module are recorded."""

    __slots__ = ("backward", "forward", "is_wrapped", "open_calls", "recompute")

    def __init__(self, name: str, is_wrapped: bool) -> None:
        self.forward = name
        self.backward = f"{name} backward"
        self.recompute = f"{name} recompute"
        self.is_wrapped = is_wrapped  # a call meets this label several times; only the outermost is recorded
        self.open_calls = 0


class ModuleCalls(Protocol):
    """What turns the calls of modules with labels into spans: of Python's engine, or of the native one."""

    def label(self, name: str, is_wrapped: bool) -> Any:
        """Return the label of a module, or of the chain of modules that wrap one."""

    def wrap(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a ``_call_impl`` that records the calls of ``original``."""

    def forget(self) -> None:
        """Give up the backwards that are going on."""


class PythonCalls:
    """The calls of the modules in ``labels``."""

    def __init__(self, tracer: Tracer, part: str, labels: dict[int, Any]) -> None:
        from commtrace.capture.model.module_backward import BackwardSpans

        self._tracer = tracer
        self._part = part
        self._labels = labels
        self._backward = BackwardSpans(tracer, part)
        self.label = Label
        self.forget = self._backward.forget

    def wrap(self, original: Callable[..., object]) -> Callable[..., object]:
        clock = self._tracer.clock
        leave_to_python(clock.mark)
        may_capture = clock.timing != schema.HOST_TIMING
        return wrap_call_impl(
            original, self._labels.get, self._tracer, self._backward, schema.MODULE, self._part, may_capture
        )


def _calls(tracer: Tracer, labels: dict[int, Any]) -> ModuleCalls:
    # Imported here: a job that records no modules needs neither.
    from commtrace.capture.model.native_modules import NativeCalls, has_native_marks

    if tracer.native is not None and has_native_marks(tracer):
        return NativeCalls(tracer.native, tracer, PART, labels)
    return PythonCalls(tracer, PART, labels)


def _calls_twice(module: torch.nn.Module) -> bool:
    # Its class has a _call_impl of its own, which may call the one that it inherits, or it is compiled in place and may
    # fall back.
    return "_call_impl" in type(module).__dict__ or module.__dict__.get("_compiled_call_impl") is not None


class ModuleSpans:
    """Choose modules and turn their calls into entries. Call it on the training thread, between steps."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._labels: dict[int, Any] = {}
        self._alive: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._patched: dict[type, tuple[Callable[..., object] | None, Callable[..., object]]] = {}
        self._made: weakref.WeakKeyDictionary[type, Callable[..., object]] = weakref.WeakKeyDictionary()
        self._compiled: list[tuple[weakref.ref[torch.nn.Module], object, object]] = []
        self._choice: ModuleChoice | None = None
        self._looks_left = 0
        self._calls = _calls(tracer, self._labels)

    def select(self, choice: str) -> None:
        """Record the modules that ``choice`` takes from now on, also in models that are made later."""
        parsed = ModuleChoice.parse(choice)
        self.clear()
        self._choice = parsed
        self._tracer.step_listeners.append(self._step_begins)
        self._tracer.optimizer_listeners.append(self._optimizer_steps)
        self._look()
        self._looks_left = 2

    def clear(self) -> None:
        self._choice = None
        self._looks_left = 0
        self._stop_listening()
        for owner, (original, replacement) in self._patched.items():
            if owner.__dict__.get("_call_impl") is replacement:
                if original is None:
                    del owner._call_impl  # type: ignore[attr-defined]
                else:
                    owner._call_impl = original  # type: ignore[attr-defined]
        self._patched.clear()
        for reference, compiled, wrapper in self._compiled:
            module = reference()
            if module is not None and module.__dict__.get("_compiled_call_impl") is wrapper:
                module.__dict__["_compiled_call_impl"] = compiled
        self._compiled.clear()
        self._labels.clear()
        self._alive.clear()
        self._calls.forget()

    @property
    def names(self) -> list[str]:
        return sorted({label.forward for label in self._labels.values()})

    # Finding modules

    def _step_begins(self) -> None:
        try:
            self._calls.forget()  # what a backward that raised left open
            if self._looks_left == 2:
                self._looks_left = 1
                self._look()
        except Exception as error:
            self._tracer.failed(PART, error)

    def _optimizer_steps(self) -> None:
        try:
            if self._looks_left:  # by now the job has trained, so its models exist
                self._looks_left = 0
                self._look()
                if not self._labels and self._choice is not None:
                    _logger.warning("commtrace: no module has a name or depth that COMMTRACE_MODULES asks for")
        except Exception as error:
            self._tracer.failed(PART, error)

    def _stop_listening(self) -> None:
        for listeners, listener in (
            (self._tracer.step_listeners, self._step_begins),
            (self._tracer.optimizer_listeners, self._optimizer_steps),
        ):
            if listener in listeners:
                listeners.remove(listener)

    def _look(self) -> None:
        choice = self._choice
        if choice is None:
            return
        modules = list(placed_modules(find_models()))
        try:
            taken = choice.taken([(placed.name, placed.depth) for placed in modules])
        except ConfigurationError as error:  # found out only now, with the names of this job
            self.clear()
            self._tracer.guard.noticed(f"no modules are recorded: {error}")
            return
        for placed in compress(modules, taken):
            if any(id(module) in self._labels for module in placed.modules):
                continue
            label = self._calls.label(placed.name, len(placed.modules) > 1 or any(map(_calls_twice, placed.modules)))
            for module in placed.modules:
                self._add(module, label)
        if self._choice is None:  # A signal's handler has stopped the recording meanwhile.
            self.clear()

    def _add(self, module: torch.nn.Module, label: Any) -> None:
        key = id(module)
        labels, alive = self._labels, self._alive

        def gone(_reference: object) -> None:  # before another object can have its id
            labels.pop(key, None)
            alive.pop(key, None)

        alive[key] = weakref.ref(module, gone)
        labels[key] = label
        self._patch(type(module))
        compiled = module.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # ``module.compile()``: torch calls this instead of _call_impl
            replacement = functools.partial(self._calls.wrap(lambda _module, /, *a, **k: compiled(*a, **k)), module)
            leave_to_python(replacement.func)
            module.__dict__["_compiled_call_impl"] = replacement
            self._compiled.append((alive[key], compiled, replacement))

    def _patch(self, owner: type) -> None:
        if owner in self._patched:
            return
        original = owner.__dict__.get("_call_impl")
        replacement = self._made.get(owner)
        if replacement is None:
            # Kept: graphs that were compiled while it was in place are valid as long as it is the same.
            replacement = self._made[owner] = self._calls.wrap(self._original(owner))
            leave_to_python(replacement)
        self._patched[owner] = (original, replacement)
        # Of the class: modules stay as they were, so copies, pickles and replicas of them are right, and not recorded.
        owner._call_impl = replacement  # type: ignore[attr-defined]
        # Again: a signal's handler may have cleared everything in between.
        self._patched[owner] = (original, replacement)

    def _original(self, owner: type) -> Callable[..., object]:
        for base in owner.__mro__:
            if base in self._patched and self._patched[base][0] is None:
                continue
            call_impl: Callable[..., object] | None = base.__dict__.get("_call_impl")
            original = self._patched[base][0] if base in self._patched else call_impl
            if original is not None:
                return original
        raise AttributeError(f"{owner.__name__} has no _call_impl")


class PlacedModule(NamedTuple):
    """A called module, as ``decoder.layers.3`` or a model's class; ``modules`` has its wrappers, outermost first."""

    name: str
    depth: int
    modules: tuple[torch.nn.Module, ...]


def find_models() -> list[torch.nn.Module]:
    """Return every module that is not part of another one; those with the most parts first."""
    import torch

    # Python's garbage collector knows all modules: no framework has to be known and no constructor hooked.
    whole = [module for module in instances_of(torch.nn.Module) if isinstance(module.__dict__.get("_modules"), dict)]
    parts = {id(child) for module in whole for child in _children(module).values()}
    models = [module for module in whole if id(module) not in parts and not _is_script(module)]
    return sorted(models, key=lambda model: -sum(1 for _ in model.modules()))


def placed_modules(models: list[torch.nn.Module]) -> Iterator[PlacedModule]:
    """Yield the modules of these models that are called; containers (``ModuleList``, ``ModuleDict``) are not."""
    seen: set[int] = set()
    main = type(_unwrapped(models[0])[-1]) if models else None
    for model in models:
        model_type = type(_unwrapped(model)[-1])
        yield from _below(model, model_type.__name__, "" if model_type is main else f"{model_type.__name__}.", 0, seen)


def _below(module: torch.nn.Module, name: str, prefix: str, depth: int, seen: set[int]) -> Iterator[PlacedModule]:
    if id(module) in seen or _is_script(module):
        return  # shared: it has the name under which it was met first
    chain = _unwrapped(module)
    seen.update(map(id, chain))
    is_called = not _is_container(chain[-1])
    if is_called:
        yield PlacedModule(name, depth, chain)
    for child_name, child in _children(chain[-1]).items():
        full_name = f"{prefix}{child_name}"
        yield from _below(child, full_name, f"{full_name}.", depth + is_called, seen)


def _unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    chain = [module]
    while True:
        children = _children(chain[-1])
        if len(children) != 1 or not _WRAPPED.issuperset(children):
            return tuple(chain)
        (inner,) = children.values()
        if inner in chain or _is_script(inner):
            return tuple(chain)
        chain.append(inner)


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: child for name, child in module.__dict__.get("_modules", {}).items() if child is not None}


def _is_container(module: torch.nn.Module) -> bool:
    import torch

    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))


def _is_script(module: torch.nn.Module) -> bool:
    import torch

    return isinstance(module, torch.jit.ScriptModule)
