from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from commtrace.analysis.timeline import Timeline
from commtrace.exporters import chrome_trace
from commtrace.trace.run import Run
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob


def exported(run: Run, directory: Path) -> dict[str, Any]:
    timeline = Timeline.of_recording(run)
    output = directory / "trace.json"
    chrome_trace.write(timeline.outline(), map(timeline.step, timeline.steps), output)
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def a_job() -> Run:
    return PipelineJob(
        stages=2, microbatches=3, data_parallel=2, transfer_ns=100_001, all_reduce_ns=500_000, steps=2, start_ns=10**15
    ).run()


def test_slices_of_a_thread_nest_and_threads_belong_to_one_process(tmp_path: Path) -> None:
    slices = [event for event in exported(a_job(), tmp_path)["traceEvents"] if event["ph"] == "X"]
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in slices:
        threads[one["tid"]].append(one)

    for thread in threads.values():
        assert len({one["pid"] for one in thread}) == 1
        open_ends: list[float] = []
        for one in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_ends and open_ends[-1] <= one["ts"]:
                open_ends.pop()
            assert not open_ends or round(one["ts"] + one["dur"], 3) <= open_ends[-1]
            open_ends.append(round(one["ts"] + one["dur"], 3))


def test_times_count_from_the_first_step_in_exact_microseconds(tmp_path: Path) -> None:
    document = exported(a_job(), tmp_path)

    forwards = [event for event in document["traceEvents"] if event.get("cat") == "forward" and event["pid"] == 3]

    assert document["otherData"]["base_ns"] == 10**15
    assert (forwards[0]["ts"], forwards[0]["dur"]) == (1100.001, 1000.0)


def test_a_message_is_an_arrow_that_does_not_go_back_in_time(tmp_path: Path) -> None:
    events = exported(a_job(), tmp_path)["traceEvents"]

    begins = {event["id"]: (number, event) for number, event in enumerate(events) if event["ph"] == "s"}
    ends = {event["id"]: (number, event) for number, event in enumerate(events) if event["ph"] == "f"}

    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * 2 * 2 * 3  # steps × replicas × (activation, gradient) × microbatches
    for number, (position, begin) in begins.items():
        assert (begin["ts"], position) < (ends[number][1]["ts"], ends[number][0])
        assert ends[number][1]["bp"] == "e"


def test_a_collective_has_the_same_correlation_on_every_rank(tmp_path: Path) -> None:
    events = exported(a_job(), tmp_path)["traceEvents"]

    ranks = defaultdict(set)
    for event in events:
        if event["ph"] == "X" and event["name"] == "all_reduce" and event["args"]["role"] == "dp":
            ranks[event["args"]["correlation"]].add(event["pid"])

    assert sorted(map(sorted, ranks.values())) == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_processes_and_threads_are_named_in_order(tmp_path: Path) -> None:
    events = exported(a_job(), tmp_path)["traceEvents"]

    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}

    assert processes[3] == "node0 / rank 3 / pp1 dp1"
    assert [threads[tid] for tid in sorted(threads) if tid // 100 == 4] == [
        "step",
        "schedule",
        "stalls",
        "pp · 1, 3",
        "pp · 1, 3",
        "dp · 2, 3",
        "mp · 0–3",
    ]


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    name = 'quote " backslash \\ newline \n </script>'
    run = make_run({0: [span("step", 0, 9, step=0), span("user", 1, 5, step=0) | {"name": name}]})

    assert name in {event["name"] for event in exported(run, tmp_path)["traceEvents"]}


def test_the_number_of_slices_is_returned(tmp_path: Path) -> None:
    timeline = Timeline.of_recording(a_job())
    output = tmp_path / "trace.json"

    written = chrome_trace.write(timeline.outline(), map(timeline.step, timeline.steps), output)

    events = json.loads(output.read_text(encoding="utf-8"))["traceEvents"]
    assert written == sum(event["ph"] == "X" for event in events)
