"""Objects are looked for without harm to what other threads are doing."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import torch

from commtrace.capture.instances import instances_of


class Part(torch.nn.Linear):
    pass


def test_objects_of_the_class_and_of_its_subclasses_are_found_and_nothing_else() -> None:
    kept = [torch.nn.Linear(1, 1), Part(1, 1), torch.nn.ReLU(), Part]
    found = [id(thing) for thing in instances_of(torch.nn.Linear)]
    assert [id(one) in found for one in kept] == [True, True, False, False]
    assert instances_of(type("Unused", (), {})) == []


def test_a_thread_that_fills_a_tuple_meanwhile_is_not_disturbed() -> None:
    """Before Python 3.14 it raises SystemError if another thread has a list of all objects."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    kept = [Part(1, 1) for _ in range(10)]
    crowd = [list[int]() for _ in range(200_000)]  # what was there before the tests is frozen
    failures: list[SystemError] = []
    is_over = threading.Event()

    def fill() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(30))
            except SystemError as error:
                failures.append(error)

    threads = [threading.Thread(target=fill) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        counts = {len(instances_of(Part)) for _ in range(30)}
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert counts == {len(kept)}
    assert failures == []
    del crowd


def test_objects_of_classes_that_hash_and_compare_in_their_own_way_are_no_obstacle() -> None:
    class Odd(type):
        def __hash__(cls) -> int:
            raise AssertionError("hashed")

        def __eq__(cls, other: object) -> bool:
            raise AssertionError("compared")

    kept = [Odd("Made", (), {})() for _ in range(3)]
    kinds: list[Any] = [type(module) for module in instances_of(torch.nn.Module)]
    assert [kind for kind in kinds if kind is Odd] == []
    assert kept


def test_each_of_many_classes_is_found() -> None:
    kept = [type(f"Part{number}", (Part,), {})(1, 1) for number in range(300)]
    assert {id(one) for one in kept} <= {id(one) for one in instances_of(Part)}


WITH_A_HOOK = """
import sys
from commtrace.capture.instances import instances_of
class Part: pass
kept, events = Part(), []
sys.addaudithook(lambda event, _: events.append(event))
found = instances_of(Part)
print(found == [kept], events.count("gc.get_objects"), len(events) < 10)
"""


def test_no_audit_event_is_raised_while_objects_are_listed() -> None:
    """A hook in Python would run, and let other threads run, once for each of them."""
    done = subprocess.run([sys.executable, "-c", WITH_A_HOOK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True 1 True\n"
