"""Nodes, and what runs on them, started once for all tests of launchers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.launchers import nodes, slurm, ssh
from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.slurm import Slurm


@pytest.fixture(scope="session")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Machines of two ranks each; most tests take the first two."""
    if reason := nodes.why_none():
        pytest.skip(reason)
    with nodes.nodes(tmp_path_factory.mktemp("nodes"), 3) as made:
        yield made


@pytest.fixture
def two_nodes(three_nodes: list[Node]) -> list[Node]:
    return three_nodes[:2]


@pytest.fixture(scope="session")
def sshd(three_nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> None:
    """From each node ssh gets to each."""
    if reason := ssh.why_none():
        pytest.skip(reason)
    ssh.start_sshd(tmp_path_factory.mktemp("ssh"), three_nodes)


@pytest.fixture(scope="session")
def slurm_cluster(three_nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """Slurm on the first two nodes."""
    if reason := slurm.why_none():
        pytest.skip(reason)
    return Slurm(tmp_path_factory.mktemp("slurm"), three_nodes[:2])
