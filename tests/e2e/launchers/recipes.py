"""The commands of the documentation, so that tests run what is written there.

A block behind ``<!-- run: NAME -->`` is a recipe; a test takes it by page and name and adapts what is the reader's own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.e2e.launch import REPOSITORY, Completed
from tests.e2e.launchers.nodes import Node

FEW_STEPS: Final = REPOSITORY / "tests/e2e/launchers/programs/few_steps.py"
PATH: Final = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def recipe(page: str, name: str, own: Mapping[str, object]) -> str:
    """Return the block of docs/``page`` with that name, each key of ``own`` replaced. All of them have to occur."""
    text = (REPOSITORY / "docs" / page).read_text()
    blocks = re.findall(rf"^<!-- run: {re.escape(name)} -->\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"docs/{page} has {len(blocks)} recipes named {name}"
    (block,) = blocks
    for theirs, replacement in own.items():
        assert theirs in block, f"{name} in docs/{page} does not hold {theirs!r} any more:\n{block}"
        block = block.replace(theirs, str(replacement))
    return str(block)


def execute(
    node: Node, script: str, directory: Path, env: Mapping[str, str] | None = None, timeout: float = 240.0
) -> Completed:
    """Run a shell script on a node, in ``directory``, with this Python's programs on PATH."""
    inside = f"cd {directory}\n{script}"
    return node.run(["bash", "-e", "-c", inside], {"PATH": PATH, **(env or {})}, timeout)


def execute_on_all(
    nodes: list[Node], script: str, directory: Path, env: Mapping[str, str] | None = None, timeout: float = 240.0
) -> list[Completed]:
    """Run a shell script on all nodes at the same time; NODE_RANK tells it which one it is on."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        running = [
            pool.submit(execute, node, script, directory, {"NODE_RANK": str(number), **(env or {})}, timeout)
            for number, node in enumerate(nodes)
        ]
        completed = [job.result() for job in running]
    for one in completed:
        assert one.returncode == 0, "\n".join(other.stdout for other in completed)
    return completed
