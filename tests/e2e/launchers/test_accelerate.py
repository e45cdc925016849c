"""``accelerate launch``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import FEW_STEPS, execute, recipe
from tests.e2e.launchers.runs import assert_live, live_environment, on_nodes, recorded

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_accelerate_launch(two_nodes: list[Node], tmp_path: Path) -> None:
    own = {
        "accelerate launch": "python -m accelerate.commands.launch",
        "--num_processes 8": "--num_processes 2",
        "/shared/runs/gpt": tmp_path / "run",
        "train.py": f"{FEW_STEPS} --targets {tmp_path / 'targets'}",
    }
    script = recipe("launchers.md", "accelerate", own)
    completed = execute(two_nodes[0], script, tmp_path, live_environment(tmp_path))
    assert completed.returncode == 0, completed.stdout

    run = recorded(tmp_path / "run")
    assert (run.attempt, run.places) == (0, on_nodes(2))
    assert_live(tmp_path, run)
