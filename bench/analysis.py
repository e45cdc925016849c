"""How long reading and analysing takes, by size; beside Holistic Trace Analysis and the original what-if program.

    python bench/analysis.py                                   # 0.2 and 2 million spans, and 1,024 ranks × 3 steps
    python bench/analysis.py --size small
    python bench/analysis.py --kineto rank-3.json.gz --hta-python ~/hta/bin/python
    python bench/analysis.py --whatif trace-ST.parquet meta-ST.yaml --whatif-program ~/StragglerAnalysis

Every figure is of a new process, start included: wall time, time on all cores, and the most memory that it held. On a
machine that does other things besides, the time on the cores says more than the wall time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SIZES: Final[Mapping[str, str]] = {
    "small": "--tp 2 --pp 4 --dp 2 --microbatches 16 --layers 16 --num-steps 20",
    "2m": "--tp 4 --pp 4 --dp 4 --microbatches 16 --layers 16 --num-steps 50",
    "1024x3": "--tp 8 --pp 8 --dp 16 --microbatches 32 --layers 32 --num-steps 3",
}
"""By name, the options of ``commtrace synth``."""

FAULTS: Final = "--fault slow-rank=5:1.2 --clock-offset 2 --clock-drift 5"
COMMANDS: Final = ("summary", "straggler", "pipeline")
COMMTRACE: Final = (sys.executable, "-m", "commtrace")
LOAD: Final = """
import statistics, sys, tempfile, time
from pathlib import Path
{imports}
taken = []
for _ in range(7):
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        {load}
        taken.append(time.process_time() - begin)
print("taken", statistics.median(taken))
"""
"""Median time on the cores of several loads of one file in one process: what a start costs is left out."""

HTA: Final = "import sys; from hta.common.trace import parse_trace_file; parse_trace_file(sys.argv[1])"
HTA_LOAD: Final = LOAD.format(
    imports="from hta.common.trace import parse_trace_file", load="parse_trace_file(sys.argv[1])"
)
COMMTRACE_LOAD: Final = LOAD.format(
    imports="from commtrace.interchange.traces.kineto import import_kineto",
    load='import_kineto([Path(sys.argv[1])], Path(folder) / "run")',
)
COUNT: Final = "import sys; from commtrace.trace.files.reader import load_run; " + (
    "print(sum(len(trace.spans) for trace in load_run(sys.argv[1]).ranks.values()))"
)


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_mb: float


def cost_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(environment or {})})
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, output.read().decode()[-2_000:])
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


def best_of(command: Sequence[str], rounds: int, environment: Mapping[str, str] | None = None) -> Cost:
    """Return the quickest of several."""
    return min(cost_of(command, environment) for _ in range(rounds))


def line(what: str, cost: Cost, spans: int = 0) -> None:
    rate = f"{spans / cost.wall_s / 1e6:8.2f}" if spans else " " * 8
    print(f"{what:44s} {cost.wall_s:8.2f} {cost.cpu_s:8.2f} {rate} {cost.peak_mb:8.0f}", flush=True)


def heading(title: str) -> None:
    print(f"\n{title:44s} {'wall s':>8s} {'cores s':>8s} {'M rows/s':>8s} {'peak MB':>8s}")


def num_spans(run: Path) -> int:
    # In another process: what this one holds would count as the peak of those that it starts.
    return int(subprocess.run([sys.executable, "-c", COUNT, str(run)], capture_output=True, check=True).stdout)


def load_seconds(python: str, script: str, file: Path) -> float:
    printed = subprocess.run([python, "-c", script, str(file)], capture_output=True, check=True, text=True).stdout
    return float(printed.split()[-1])


def analysis(size: str, folder: Path, rounds: int) -> None:
    run = folder / size
    made = cost_of([*COMMTRACE, "synth", "-o", str(run), *SIZES[size].split(), *FAULTS.split()])
    spans = num_spans(run)
    heading(f"{size}: {spans:,} spans")
    line("synth", made, spans)
    for command in COMMANDS:
        line(command, best_of([*COMMTRACE, command, str(run), "--steps", "0:"], rounds), spans)


def kineto(files: Sequence[Path], folder: Path, rounds: int, hta_python: str) -> None:
    """Import single Kineto files, beside HTA's load of the same."""
    for file in files:
        heading(f"{file.name} ({file.stat().st_size / 1e3:,.0f} kB)")
        costs = [
            cost_of([*COMMTRACE, "import", "kineto", str(file), "-o", str(folder / f"{file.name}-{number}")])
            for number in range(rounds)
        ]
        line("commtrace import kineto", min(costs))
        if hta_python:
            own, other = load_seconds(sys.executable, COMMTRACE_LOAD, file), load_seconds(hta_python, HTA_LOAD, file)
            line("HTA, the same file", best_of([hta_python, "-c", HTA, str(file)], rounds))
            print(f"The load alone: commtrace {own * 1e3:.1f} ms, HTA {other * 1e3:.1f} ms: {other / own:.1f} times")
        else:
            print("HTA: not installed (pip install HolisticTraceAnalysis, or give --hta-python)")


def what_if(trace: Path, meta: Path, folder: Path, rounds: int, program: str, python: str) -> None:
    """Analyse a published trace, beside the program of its authors."""
    heading(trace.name)
    run = folder / trace.stem
    line(
        "commtrace import whatif",
        cost_of([*COMMTRACE, "import", "whatif", str(trace), "--meta", str(meta), "-o", str(run)]),
    )
    line("commtrace straggler", best_of([*COMMTRACE, "straggler", str(run)], rounds))
    if not program:
        print("The original program: not installed (clone ByteDance-Seed/StragglerAnalysis, give --whatif-program)")
        return
    command = [python, f"{program}/analyzer/wia.py", "--metadata", str(meta), "--trace", str(trace)]
    command += ["--dump-dir", str(folder / "original"), "--root", str(folder / "original")]
    line("the original program (wia.py)", best_of(command, rounds, {"PYTHONPATH": program}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=sorted(SIZES), help="Of synthetic runs; default: all.")
    parser.add_argument("--rounds", type=int, default=3, help="The quickest of so many counts.")
    parser.add_argument("--kineto", nargs="*", type=Path, default=[], help="Kineto files.")
    parser.add_argument("--hta-python", default="", help="A Python that HTA is installed in.")
    parser.add_argument("--whatif", nargs=2, type=Path, metavar=("TRACE", "META"), help="A published trace.")
    parser.add_argument("--whatif-program", default="", help="A clone of StragglerAnalysis.")
    parser.add_argument("--whatif-python", default=sys.executable, help="A Python that has what it needs.")
    chosen = parser.parse_args()
    hta_python = chosen.hta_python or (sys.executable if importlib.util.find_spec("hta") else "")
    load = os.getloadavg()[0]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        end="",
    )
    print(f"{time.strftime('%Y-%m-%d')}, load average before: {load:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        sizes = chosen.size or ([] if chosen.kineto or chosen.whatif else list(SIZES))
        for size in sizes:
            analysis(size, Path(folder), chosen.rounds)
        kineto(chosen.kineto, Path(folder), chosen.rounds, hta_python)
        if chosen.whatif:
            trace, meta = chosen.whatif
            what_if(trace, meta, Path(folder), chosen.rounds, chosen.whatif_program, chosen.whatif_python)


if __name__ == "__main__":
    main()
