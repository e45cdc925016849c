"""Train on some ranks, none of them slowed, for half an hour, and count the false alarms of the monitor.

    python bench/monitor_clean.py                       # 30 minutes, default windows
    python bench/monitor_clean.py --minutes 5 --ranks 8 --keep clean-run

A step computes a little and mostly sleeps, so that four ranks together need a small part of two cores. Every rank
notes with a clock of its own, not with commtrace's spans, how long it worked in each step. An alarm is *honest* when
these notes agree that the rank worked longer than the others in the windows before it, by the limits that the monitor
promises; otherwise it is *false*. On a machine with other work to do, a rank can really be slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

SLEEP_SECONDS: Final = 0.06
SHARE_OF_STEP: Final = 0.05
LEAST_SECONDS: Final = 0.001


class Note(NamedTuple):
    """One step by the rank's own clock: its end (epoch seconds), its length, and how long the rank worked."""

    end: float
    seconds: float
    work: float


def train(folder: Path, seconds: float) -> None:
    """Run one rank: forward, backward, all_reduce of the gradients, optimizer."""
    import torch
    import torch.distributed as dist

    import commtrace
    import commtrace.auto

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, goes_on = torch.ones(32, 256), torch.ones(1)
    begin, number = time.monotonic(), 0
    with (folder / f"rank-{rank}.jsonl").open("w", buffering=1) as notes:
        while goes_on.item():
            with commtrace.step(number):
                start = time.perf_counter()
                with commtrace.span("forward"):
                    time.sleep(SLEEP_SECONDS)
                    loss = model(batch).square().mean()
                loss.backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                arrived = time.perf_counter()
                dist.all_reduce(flat)
                left = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
                goes_on = torch.full((1,), float(time.monotonic() - begin < seconds))
                again = time.perf_counter()
                dist.all_reduce(goes_on, dist.ReduceOp.MIN)
                end = time.perf_counter()
            notes.write(json.dumps([time.time(), end - start, arrived - start + again - left]) + "\n")
            number += 1
    dist.destroy_process_group()


def excess(notes: Mapping[int, Sequence[Note]], rank: int, begin: float, end: float) -> tuple[float, float]:
    """Return how much longer a rank worked than the median of the others from begin to end, and the step; seconds."""
    work, step = {}, []
    for one, own in notes.items():
        inside = [note for note in own if begin <= note.end < end]
        if inside:
            work[one] = statistics.fmean(note.work for note in inside)
            step.append(statistics.fmean(note.seconds for note in inside))
    others = [value for one, value in work.items() if one != rank]
    if rank not in work or not others:
        return 0.0, 0.0
    return work[rank] - statistics.median(others), statistics.median(step)


def is_honest(event: Mapping[str, Any], notes: Mapping[int, Sequence[Note]], window_seconds: float) -> bool:
    """Return whether the ranks' own clocks agree with an alarm, from its beginning until it was reported."""
    finding = event["finding"]
    if finding["kind"] != "slow" or not finding["ranks"]:
        return False
    begin, end = finding["since_ns"] / 1e9, event["time_ns"] / 1e9
    over, step = excess(notes, finding["ranks"][0], begin - window_seconds, end)
    return over > max(SHARE_OF_STEP * step, LEAST_SECONDS)


def report(folder: Path, ranks: int, minutes: float, window_seconds: float) -> int:
    """Print the alarms and return 1 if some were false."""
    notes = {
        rank: [Note(*json.loads(line)) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    }
    status = json.loads((folder / "run" / "monitor.json").read_text())
    file = folder / "run" / "monitor.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    alarms = [event for event in events if event["kind"] != "recovered"]
    steps = [note.seconds for note in notes[0]]
    print(
        f"{minutes:g} minutes, {ranks} ranks, windows of {window_seconds:g} s; {len(steps)} steps, median "
        f"{1e3 * statistics.median(steps):.1f} ms; load {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores"
    )
    print(f"the monitor heard {status['ranks_heard']} ranks, last step {status['last_step']}")
    false = 0
    for event in alarms:
        honest = is_honest(event, notes, window_seconds)
        false += not honest
        print(f"{'honest' if honest else 'FALSE'}: {event['sentence']}")
    print(f"alarms: {len(alarms)}, false: {false}")
    return 1 if false or status["ranks_heard"] < ranks else 0


def main() -> int:
    """Run the job and print the alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--window", type=float, default=4.0, help="seconds; what COMMTRACE_MONITOR_SECONDS is")
    parser.add_argument("--keep", type=Path, help="a new directory for the run and the notes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=options.keep is None)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COMMTRACE_DIR": str(folder / "run"),
            "COMMTRACE_EXPORT": "monitor",
            "COMMTRACE_MONITOR_SECONDS": str(options.window),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        subprocess.run(
            [*command, __file__, "--train", str(folder), str(60 * options.minutes)],
            env=environment,
            timeout=60 * options.minutes + 300,
            check=True,
        )
        return report(folder, options.ranks, options.minutes, options.window)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        sys.exit(main())
