"""``commtrace bandwidth``: what a terminal of a hundred columns shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.communication.links import NodeLink, NodeTraffic, SlowTraffic
from commtrace.cli.commands.bandwidth import slow_links_text
from commtrace.cli.main import app

runner = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "run"
    result = runner.invoke(app, ["synth", "-o", str(directory), "--pp", "2", "--dp", "4", "--num-steps", "3"])
    assert result.exit_code == 0, result.output
    return directory


@pytest.mark.parametrize("by", ["operation", "size", "group"])
def test_no_line_is_longer_than_a_hundred_columns(made: Path, by: str) -> None:
    lines = runner.invoke(app, ["bandwidth", str(made), "--by", by]).output.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line.startswith("dp ")]


def test_sizes_and_groups_have_a_column(made: Path) -> None:
    assert "MiB" in runner.invoke(app, ["bandwidth", str(made), "--by", "size"]).output
    assert " 4–7 " in runner.invoke(app, ["bandwidth", str(made), "--by", "group"]).output


def test_a_slow_link_is_named_with_what_others_carry() -> None:
    link = NodeLink(NodeTraffic("send", 2, 22), "node0", "node1", 3, 0.0241)
    assert slow_links_text(SlowTraffic((link,), 1.1, within_nodes=False)) == (
        "Slow link: node0 → node1 carries 24.1 MB/s (messages of 4–8 MiB); between other nodes it is 1.10 GB/s."
    )


def test_slow_links_of_one_node_name_the_node() -> None:
    traffic = NodeTraffic("all_reduce", 4, 20)
    links = tuple(NodeLink(traffic, *nodes, 3, 0.0241) for nodes in (("a", "c"), ("b", "c")))
    assert slow_links_text(SlowTraffic(links, 0.5, within_nodes=False)) == (
        "Slow links: a – c carries 24.1 MB/s, b – c carries 24.1 MB/s (all_reduce of 1–2 MiB); between other nodes it "
        "is 500 MB/s. All of them are links of c."
    )


def test_the_only_link_is_compared_with_what_passes_within_a_node() -> None:
    link = NodeLink(NodeTraffic("send", 2, 22), "node0", "node1", 3, 0.0241)
    assert slow_links_text(SlowTraffic((link,), 12.3, within_nodes=True)) == (
        "Slowest link: node0 → node1 carries 24.1 MB/s (messages of 4–8 MiB), within a node it is 12.3 GB/s. There is "
        "no other pair of nodes to compare with: is that what the network should carry?"
    )


def test_a_simulated_job_whose_links_are_alike_has_no_slow_one(made: Path) -> None:
    assert "Slow link" not in runner.invoke(app, ["bandwidth", str(made)]).output
