"""Compares everything of torch, megatron-core and DeepSpeed that can be called, before a recording and after it.

Of the two frameworks: those that are installed.

python tests/e2e/programs/restores.py DIRECTORY
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import wrapt

import commtrace

ROOTS = ("torch", "megatron", "deepspeed")
IMPORTED = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.parallel_state",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing.serialization",
    "deepspeed",
    "deepspeed.runtime.pipe.engine",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.data.dataloader",
    "torch.distributed._functional_collectives",
)
CYCLES = 6
TRIES = 20


def namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Modules and the classes that they define, with what is in them."""
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in ROOTS and isinstance(module, ModuleType):
            yield name, vars(module)
            for found in list(vars(module).values()):
                if isinstance(found, type) and found.__module__ == name:
                    yield f"{name}.{found.__qualname__}", dict(vars(found))


def callables(namespace: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in list(namespace.items())
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }


def cells(function: Any) -> list[Any]:
    """What a decorated function holds."""
    closure = getattr(getattr(function, "__func__", function), "__closure__", None)
    if not isinstance(closure, tuple):
        return []
    return [cell.cell_contents for cell in closure if callable(_content(cell))]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def snapshot() -> dict[str, Any]:
    """By a name for the place: what is there."""
    places: dict[str, Any] = {}
    for owner, namespace in namespaces():
        for name, value in callables(namespace).items():
            places[f"{owner}.{name}"] = value
            for number, content in enumerate(cells(value)):
                places[f"{owner}.{name}<cell {number}>"] = content
    for name in operators():
        library, _, operator = name.partition(".")[0].partition("::")
        packet = getattr(getattr(torch.ops, library), operator)
        places |= {f"torch.ops {name}": packet._op, f"torch.ops {name}.default": packet.default._op}
    places |= {f"gc.callbacks[{number}]": value for number, value in enumerate(gc.callbacks)}
    places |= {f"signal {number}": signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    return places


def texts() -> dict[str, str]:
    """What can only be compared as text or as a number."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer

    found = {f"dispatcher {name}": torch._C._dispatch_dump(name) for name in operators()}
    found["post-import hooks"] = str(sorted(wrapt.importer._post_import_hooks))
    found["threads"] = str(sorted(thread.name for thread in threading.enumerate()))
    for owner in (modules, optimizer):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found[f"{owner.__name__}.{name}"] = str(list(value.values()))
    return found


def operators() -> list[str]:
    named = torch._C._dispatch_get_all_op_names()
    return sorted({name for name in named if name.startswith(("c10d::", "_c10d_functional::"))})


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = [place for place in before if place in after and after[place] is not before[place]]
    return changed + sorted(set(before) - set(after)) + sorted(set(after) - set(before))


def work() -> None:
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    pending = dist.all_reduce(tensor, async_op=True)
    assert pending is not None
    pending.wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        with commtrace.step(number):
            model(torch.ones(2, 4)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def await_threads() -> None:
    """Stopping waits for no thread that copies stacks: such a one looks four times a second whether it is over."""
    for thread in threading.enumerate():
        if thread.name == "commtrace-stacks":
            thread.join(timeout=5.0)


def objects(first: Counter[str] | None) -> Counter[str]:
    """Count commtrace's objects by type, once threads that end have let go of theirs: they are no more than first."""
    count, before = Counter[str](), None
    for _ in range(TRIES):
        gc.collect()
        types = map(type, gc.get_objects())
        count = Counter(str(one) for one in types if str(one.__module__).split(".")[0] == "commtrace")
        if count == before and (first is None or count <= first):
            break
        before = count
        time.sleep(0.1)
    return count


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    work()  # torch fills tables of its own when things run for the first time
    before, before_texts = snapshot(), texts()
    commtrace.start(commtrace.Config.from_env({"COMMTRACE_ENABLED": "0", "COMMTRACE_DIR": f"{sys.argv[1]}/disabled"}))
    told: dict[str, Any] = {
        "disabled": differences(before, snapshot())
        + [name for name, text in texts().items() if text != before_texts[name]]
    }
    commtrace.stop()
    for cycle in range(CYCLES):
        before, before_texts = snapshot(), texts()
        commtrace.start(commtrace.Config(dir=f"{sys.argv[1]}/{cycle}", trigger_signal="SIGUSR2"))
        replaced = differences(before, snapshot())
        work()
        commtrace.stop()
        await_threads()
        after, after_texts = snapshot(), texts()
        told[f"replaced {cycle}"] = len(replaced)
        told[f"left behind {cycle}"] = differences(before, after)
        told[f"texts {cycle}"] = sorted(
            name for name in before_texts | after_texts if before_texts.get(name) != after_texts.get(name)
        )
        del before, after, replaced
        told[f"objects {cycle}"] = objects(told["objects 1"] if cycle == CYCLES - 1 else None)
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
