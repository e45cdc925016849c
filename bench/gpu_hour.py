"""Ten minutes of one GPU: everything that only a GPU can tell, in the order of what is least known, and one table.

    python bench/gpu_hour.py                       # or: make gpu
    python bench/gpu_hour.py --rehearse            # the same without a GPU, with tiny sizes: figures mean nothing
    python bench/gpu_hour.py --only engine,steps

Each stage (tests/gpu/stages) is a process with a time limit. After each of them all files go into one archive,
``OUTPUT/gpu-hour.tar.gz``, and the table so far into ``OUTPUT/table.md``: whoever ends the program early keeps what
there is. The table goes into docs/gpu-validation.md and bench/RESULTS.md.

Needs Linux, Python 3.10 or newer, torch 2.11 or newer with CUDA, commtrace's dependencies and pytest; megatron-core for
its stage. Nothing is installed, downloaded or built.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.e2e.launch import Completed, run  # noqa: E402
from tests.gpu.machine import machine  # noqa: E402
from tests.gpu.stages import QUESTIONS  # noqa: E402
from tests.gpu.stages.stage import patient, read_answers  # noqa: E402
from tests.gpu.table import FAILS, Row, markdown  # noqa: E402

NO_GPU: Final = (
    "There is no GPU here (torch.cuda.is_available() is False): `python bench/gpu_hour.py --rehearse` tries the script."
)
_LEAST_SECONDS: Final = 15.0


class Stage(NamedTuple):
    """A module that is run as a program, and the seconds after which it is ended."""

    name: str
    seconds: float
    package: str = "tests.gpu.stages"


STAGES: Final = (
    Stage("engine", 60.0),
    Stage("graphs", 75.0),
    Stage("call_costs", 120.0),
    Stage("accuracy", 130.0),
    Stage("steps", 160.0),
    Stage("driver", 60.0),
    Stage("leads", 30.0),
    Stage("megatron", 125.0),
    Stage("robustness", 80.0),
)
"""The least known first. A new one is a module with questions of its own in ``QUESTIONS``, and a line here."""


class Report:
    """The archive, the table and the log in the output folder, written anew after each stage."""

    def __init__(self, output: Path, files: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._output = output
        self._files = files
        self._log: list[str] = []
        self.rows: list[Row] = []

    def add(self, stage: Stage, completed: Completed, seconds: float) -> None:
        """Add a stage that has ended."""
        folder = self._files / stage.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "output.txt").write_text(completed.stdout)
        self.rows += read_answers(folder)
        verdict = "ended well"
        if completed.timed_out:
            verdict = f"{FAILS}: no end after {stage.seconds:.0f} s"
        elif completed.returncode:
            verdict = f"{FAILS}: {(completed.stdout.strip().splitlines() or [''])[-1][:300]}"
        self.note(f"{stage.name}: {verdict}, {seconds:.0f} s")

    def note(self, line: str) -> None:
        """Print a line, and keep it."""
        self._log.append(line)
        print(line, flush=True)
        self._write()

    def table(self) -> str:
        """Return the table and what became of the stages."""
        table = markdown(self.rows, machine(), QUESTIONS, variant="engine", why_missing="no stage answered it")
        return "\n".join([table, "", *self._log, ""])

    def _write(self) -> None:
        (self._output / "table.md").write_text(self.table())
        archive = self._output / "gpu-hour.tar.gz"
        unfinished = archive.with_suffix(".unfinished")
        with tarfile.open(unfinished, "w:gz") as tar:
            tar.add(self._files, "gpu-hour")
            tar.add(self._output / "table.md", "gpu-hour/table.md")
        unfinished.replace(archive)  # a whole one is there at any time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; return 0 if each of them ended well, whatever it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT") or "gpu-hour")
    parser.add_argument("--output", type=Path, default=default, help="default $OUT, or gpu-hour")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all stages together, default 560")
    parser.add_argument("--only", type=lambda text: text.split(","), help="stages, separated by commas")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, even where there is one")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no stage is called {', '.join(unknown)}; there are {', '.join(stage.name for stage in STAGES)}")
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    stages = [
        stage._replace(seconds=patient(stage.seconds))
        for stage in STAGES
        if options.only is None or stage.name in options.only
    ]
    with tempfile.TemporaryDirectory(prefix="gpu-hour-") as folder:
        report = Report(options.output, Path(folder))
        is_well = run_stages(stages, report, Path(folder), time.monotonic() + options.seconds)
    print(f"\n{report.table()}\n{options.output / 'gpu-hour.tar.gz'} has all files.")
    return 0 if is_well else 1


def run_stages(stages: Sequence[Stage], report: Report, folder: Path, deadline: float) -> bool:
    """Run the stages one after the other until the deadline; return whether each of them ended well."""
    is_well = True
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for stage in stages:
        left = deadline - time.monotonic()
        seconds = min(stage.seconds, left)
        if left < _LEAST_SECONDS:
            report.note(f"{stage.name}: not run, time was up")
            is_well = False
            continue
        begin = time.monotonic()
        command = [sys.executable, "-m", f"{stage.package}.{stage.name}", str(folder / stage.name)]
        completed = run(command, {"PYTHONPATH": path}, seconds)
        report.add(stage._replace(seconds=seconds), completed, time.monotonic() - begin)
        is_well = is_well and completed.returncode == 0
    return is_well


if __name__ == "__main__":
    sys.exit(main())
