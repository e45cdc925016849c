"""Every reading command answers on the first screen of a terminal of 80 columns and 24 lines, whatever was recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.synth import Fault, Job, synthesize, write
from commtrace.trace import schema
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.schema import mark_row
from tests.interchange.traces.kineto_files import kernel, nccl, write_trace
from tests.trace.rows import row, write_rank

COLUMNS: Final = 80
LINES: Final = 24
SECOND: Final = 10**9

SMALL: Final = {"pp": 2, "dp": 4, "steps": 16, "microbatches": 4}
LARGE: Final = {"tp": 2, "pp": 4, "dp": 8, "steps": 10, "microbatches": 4}


def simulated(size: Mapping[str, int], *faults: str) -> Callable[[Path], None]:
    job = Job(**size, faults=tuple(map(Fault.parse, faults)))  # type: ignore[arg-type]

    def make(directory: Path) -> None:
        write(synthesize(job), directory)

    return make


def hung(size: Mapping[str, int]) -> Callable[[Path], None]:
    """After its last step, all ranks but the last one wait in the world's group; nobody ends."""

    def make(directory: Path) -> None:
        synthetic = synthesize(Job(**size))  # type: ignore[arg-type]
        ranks = range(synthetic.job.world_size)
        for rank in ranks:
            trace = synthetic.rank_trace(rank)
            last = int(trace.spans.end.max())
            world = max(trace.groups.values(), key=lambda group: len(group.ranks))
            flight = {
                "operation": "all_reduce", "group": world.id, "seq": 0, "peer": -1, "bytes": 8, "start": last,
                "dtype": "float32", "is_async": False, "blocking": True,
            }  # fmt: skip
            writer = SegmentWriter(directory, replace(trace.metadata, session=1, run_id="gpt"))
            writer.write([
                *(mark_row("process_group", group.to_json(), at_ns=0) for group in trace.groups.values()),
                mark_row("topology", synthetic.topology(rank), at_ns=0),
            ])  # fmt: skip
            writer.write_spans(trace.spans, synthetic.names)
            waits = [] if rank == max(ranks) else [flight]
            writer.write([mark_row("in_flight", waits, at_ns=last + 100 * SECOND)])

    return make


def imported(directory: Path) -> None:
    traces = directory.with_name(f"{directory.name}-traces")
    traces.mkdir()
    ranks = range(8)
    files = [
        write_trace(
            traces / f"rank-{rank}.json",
            [kernel(100, 50 + rank), nccl(150 + rank, 60 - rank, ranks=list(ranks), seq=1)],
            rank=rank,
            world_size=8,
        )
        for rank in ranks
    ]
    result = CliRunner().invoke(app, ["import", "kineto", *map(str, files), "-o", str(directory)])
    assert result.exit_code == 0, result.output


def without_steps(directory: Path) -> None:
    write_rank(directory, [row(kind=schema.COLLECTIVE, name="all_reduce", start=1, end=2)], run_id="gpt")


RUNS: Final[Mapping[str, Callable[[Path], None]]] = {
    "slow rank of 8": simulated(SMALL, "slow-rank=3:1.5"),
    "slow rank of 64": simulated(LARGE, "slow-rank=13:1.4"),
    "slow link of 8": simulated(SMALL, "slow-link=2:6"),
    "slow link of 64": simulated(LARGE, "slow-link=10-11:8"),
    "five faults of 8": simulated(
        SMALL, "slow-rank=3:1.5", "data=5:40@4:9", "gc=1:60@5:6", "slow-link=2:4", "checkpoint=0:90@10:11"
    ),
    "bubble of 8": simulated({"pp": 8, "microbatches": 2, "steps": 12}),
    "bubble of 64": simulated({"pp": 8, "dp": 4, "tp": 2, "microbatches": 2, "steps": 8}),
    "hang of 8": hung(SMALL),
    "hang of 64": hung(LARGE),
    "Kineto's traces": imported,
    "no step": without_steps,
}

READING: Final = (
    "summary", "straggler", "bandwidth", "bandwidth --by size", "bandwidth --by group", "pipeline", "doctor", "whatif",
    "whatif --bandwidth all=2x", "list", "hosts", "compare", "top --once", "report -o page.html",
)  # fmt: skip
FOUND: Final = ("STRAGGLER", "HANG", "STOPPED", "Lost time")
"""What findings begin with in ``commtrace top``."""

WITH_HEAD: Final = ("summary", "straggler", "bandwidth", "pipeline", "whatif")


class Terminal:
    """A terminal of 80 columns in the directory of a run. What was asked for once is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[tuple[str, str], tuple[int, list[str]]] = {}

    def ask(self, name: str, command: str) -> tuple[int, list[str]]:
        """Return the exit status, and the lines."""
        key = (name, command)
        if key not in self._answers:
            self._answers[key] = self._asked(self._folder / str(list(RUNS).index(name)), name, command)
        return self._answers[key]

    def _asked(self, folder: Path, name: str, command: str) -> tuple[int, list[str]]:
        if not folder.is_dir():
            folder.mkdir()
            RUNS[name](folder / "gpt")
            shutil.copytree(folder / "gpt", folder / "other")
        word, *options = command.split()
        runs = {"list": ["."], "hosts": ["."], "compare": ["gpt", "other"]}.get(word, ["gpt"])
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)  # as of somebody who looks at it there: paths are short
            patched.setenv("COLUMNS", str(COLUMNS))
            result = CliRunner().invoke(app, [word, *runs, *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output.splitlines()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", RUNS)
def test_the_answer_is_on_the_first_screen(name: str, terminal: Terminal) -> None:
    for command in READING:
        status, lines = terminal.ask(name, command)
        head = lines[: lines.index("")] if "" in lines else lines

        assert status in (0, 1, 2, 3), (command, lines)
        if status != 2:  # else it is an error, which is one line
            assert [line for line in lines if len(line.rstrip()) > COLUMNS and "commtrace " not in line] == [], command
        if command.startswith("top"):  # a frame without a terminal has the evidence between the findings
            head = lines[: max((i for i, line in enumerate(lines) if line.startswith(FOUND)), default=0)]
        assert len(head) < LINES, command
        if command.split()[0] in WITH_HEAD and status == 0:
            assert lines[0].startswith("Run gpt · ")


@pytest.mark.parametrize("name", RUNS)
def test_every_command_begins_with_the_same_findings(name: str, terminal: Terminal) -> None:
    heads = {}
    for command in WITH_HEAD:
        status, lines = terminal.ask(name, command)
        if status == 0:
            heads[command] = tuple(lines[: lines.index("")])

    assert len(set(heads.values())) == 1, heads


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("slow rank of 8", "rank 3 on node0, compute: "),
        ("slow rank of 64", "rank 13 on node1, compute: "),
        ("slow link of 8", "rank 2 on node0, communication: "),
        ("bubble of 8", "waiting for pipeline neighbours (bubble): "),
        ("bubble of 64", "waiting for pipeline neighbours (bubble): "),
        ("hang of 8", "The job hangs: 1 communication is held up by rank 7."),
        ("hang of 64", "The job hangs: 1 communication is held up by rank 63."),
    ],
)
def test_the_first_screen_has_the_finding_and_what_to_do(name: str, finding: str, terminal: Terminal) -> None:
    for command in WITH_HEAD:
        _, lines = terminal.ask(name, command)
        screen = "\n".join(lines[:LINES])

        assert finding in screen, command
        assert "\n→ " in screen, command
