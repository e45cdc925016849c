"""Objects are looked for without harm to what other threads are doing."""

from __future__ import annotations

import sys
import threading

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
