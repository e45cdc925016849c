"""The bandwidth that a link is limited to comes out of ``commtrace bandwidth``, and the link is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import execute_on_all

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

MEGABITS_PER_SECOND = 200
"""Little enough for a busy machine: at 400, of a load of 60, half of it was measured."""
GBPS = MEGABITS_PER_SECOND / 8e3 * 1448 / 1514
"""Of a full frame, which is what the limit counts, these are the bytes of a message."""
TOLERANCE = 0.15
"""0.86 to 1.0 times a limit of 400 Mbit/s were measured on 2 cores with 16 to 40 processes to run."""
NUM_BYTES = 16 << 20
"""0.7 s over the limited link, so that an error of the clocks of some ms does not count."""


@pytest.fixture(scope="module")
def directory(three_nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank on each of three nodes, the last of which may send little at a time."""
    script = (
        "RANK=$NODE_RANK WORLD_SIZE=3 MASTER_ADDR=node0 MASTER_PORT=29600 "
        f"python tests/e2e/launchers/programs/large_messages.py {NUM_BYTES}"
    )
    three_nodes[2].limit(MEGABITS_PER_SECOND)
    made = tmp_path_factory.mktemp("slow") / "run"
    try:
        execute_on_all(three_nodes, script, Path.cwd(), {"COMMTRACE_DIR": str(made)})
    finally:
        three_nodes[2].unlimit()
    return made


@pytest.fixture(scope="module")
def told(directory: Path) -> Any:
    return json.loads(_bandwidth(directory, "--json"))


def test_the_slow_link_is_named_with_its_bandwidth(directory: Path, told: Any) -> None:
    slow = told["slow_links"]
    assert {(link["source"], link["target"]) for link in slow["links"]} == {("node2", "node0"), ("node2", "node1")}
    assert slow["common_node"] == "node2"
    assert [link["gbps"] for link in slow["links"]] == pytest.approx([GBPS, GBPS], rel=TOLERANCE)
    assert slow["usual_gbps"] > 2 * GBPS

    printed = " ".join(_bandwidth(directory).split())
    assert "Slow links: node2 → node" in printed
    assert "All of them are links of node2." in printed


def test_collectives_are_as_fast_as_their_slowest_link(told: Any) -> None:
    """A ring of all_reduce passes the limited link once; a broadcast does where the root is behind it."""
    (row,) = (row for row in told["communication"] if row["operation"] == "all_reduce")
    assert row["inter_node"]
    assert row["busbw_gbps"] == pytest.approx(GBPS, rel=TOLERANCE)


def test_clocks_agree_within_what_is_said_of_them(told: Any) -> None:
    """The nodes have one clock, and a boot each: whatever offset is found is an error."""
    alignment = told["alignment"]
    residual = alignment["residual_ns"]["p99"]
    offsets = [host["offset_ns"] for host in alignment["hosts"]]
    assert len(offsets) == 3
    assert [host["steps"] for host in alignment["hosts"]] == [[], [], []]
    assert max(map(abs, offsets)) <= residual


def _bandwidth(directory: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["bandwidth", str(directory), *options])
    assert result.exit_code == 0, result.output
    return result.stdout
