"""``stop()`` puts every original back, exactly; being off patches nothing; starting again leaves nothing growing.

Only two hooks on optimizers stay, once they have been there. Kernels in torch's dispatcher do where other threads run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.launch import REPOSITORY, run

pytestmark = pytest.mark.e2e


def test_everything_that_can_be_called_is_what_it_was(tmp_path: Path) -> None:
    program = REPOSITORY / "tests" / "e2e" / "programs" / "restores.py"
    completed = run([sys.executable, "-W", "ignore", str(program), str(tmp_path)], {"DS_ACCELERATOR": "cpu"}, 180.0)
    assert completed.returncode == 0, completed.stdout
    told = json.loads(completed.stdout.splitlines()[-1])

    assert told["disabled"] == []
    assert not (tmp_path / "disabled").exists()
    # What torch itself fills in when it is used for the first time is no patch.
    assert [place for place in told["left behind 0"] if place != "torch._opaque_base._FakeScriptObject_cls"] == []
    assert [told[f"left behind {cycle}"] for cycle in range(1, 6)] == [[]] * 5
    hooks = [f"torch.optim.optimizer._global_optimizer_{when}_hooks" for when in ("post", "pre")]
    assert told["texts 0"] == hooks
    assert [told[f"texts {cycle}"] for cycle in range(1, 6)] == [[]] * 5
    assert told["replaced 1"] > 100
    # Ended watches keep a place or two more or less, by what they saw last. What each recording leaves would be four.
    more = Counter(told["objects 5"]) - Counter(told["objects 1"])
    assert {name: count for name, count in more.items() if count > 3} == {}
