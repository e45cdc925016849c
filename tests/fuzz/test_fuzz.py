"""No damaged input ends in a traceback, takes 1 GB or 30 s, or gives other numbers without a word.

``make fuzz`` tries many more. ``python -m tests.fuzz.runner NUMBER`` shows one of them again.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.fuzz.mutators import damage_bytes
from tests.fuzz.runner import run_inputs

INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PARTS = 4
"""Each in one process, so that pytest's own workers share them."""


def test_bytes_are_always_damaged_and_always_alike() -> None:
    content = bytes(range(200))
    damaged = [damage_bytes(content, Random(number)) for number in range(200)]
    assert content not in damaged
    assert damaged == [damage_bytes(content, Random(number)) for number in range(200)]


@pytest.mark.thorough
@pytest.mark.timeout(1800)  # ten seconds where nothing else runs
@pytest.mark.parametrize("part", range(PARTS))
def test_no_damaged_input_does_harm(part: int) -> None:
    numbers = range(INPUTS * part // PARTS, INPUTS * (part + 1) // PARTS)
    failures = run_inputs(numbers, SEED, workers=1)
    told = "\n".join(f"{one.number} {one.door}: {one.use}\n{one.why}" for one in failures[:5])
    assert not failures, f"{len(failures)} of {len(numbers)} inputs, such as:\n{told}"
