"""Each cause of a straggler, injected into a real job of four ranks, is told from the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.straggler import Findings, find_stragglers
from tests.e2e.launch import REPOSITORY, launch

pytestmark = pytest.mark.e2e
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "injected_causes.py"
OPTIONS = ["--pipeline", "2", "--microbatches", "8", "--hidden", "64", "--sequence", "32", "--iterations", "12"]
# The replicas of a stage are on different hosts: host a is ranks 0 and 2, host b ranks 1 and 3.
TWO_HOSTS = 'export COMMTRACE_NODE_ID=$([ $((LOCAL_RANK % 2)) = 0 ] && echo a || echo b); exec "$@"'


def findings(directory: Path, cause: str) -> Findings:
    command = ["--no-python", "bash", "-c", TWO_HOSTS, "bash", "python", PROGRAM, cause, *OPTIONS]
    environment = {
        "COMMTRACE_DIR": str(directory),
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    completed = launch(command, 4, environment, timeout=120)
    assert completed.returncode == 0, completed.stdout
    analysis = analyse(directory)
    return find_stragglers(analysis.run, analysis.matches)


@pytest.mark.parametrize(
    ("injected", "cause", "ranks"),
    [
        ("communication", "communication", {1}),
        ("data", "data", {1}),
        ("gc", "gc", {1}),
        ("stage", "stage_imbalance", {2, 3}),
        ("sequences", "sequence_length_imbalance", {-1}),
        ("host", "host", {1, 3}),
    ],
)
def test_the_injected_cause_is_the_dearest_verdict(injected: str, cause: str, ranks: set[int], tmp_path: Path) -> None:
    found = findings(tmp_path / "run", injected)
    assert found.verdicts, f"nothing was found; {injected} was injected; {found.abstentions}"
    assert (found.verdicts[0].cause, found.verdicts[0].rank in ranks) == (cause, True), found.verdicts
