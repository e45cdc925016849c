"""A run as the page of ``commtrace view`` reads it: resources by name, made when they are asked for.

One thread reads the run: first what the timeline needs, then the summary. What is not there yet is pending.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from commtrace.analysis.chain import Analysis
from commtrace.analysis.pipeline.plan import plan_of_steps
from commtrace.analysis.summary import Summary
from commtrace.analysis.timeline import Timeline, step_durations
from commtrace.analysis.windows.run import ALONE, OpenedRun, Workers, open_run
from commtrace.trace.files.locate import find_run_directory, rank_directories
from commtrace.trace.files.rank_files import segment_paths
from commtrace.viewer.choice import DrawnSteps, steps_to_draw
from commtrace.viewer.comparison import comparison_resources
from commtrace.viewer.data import (
    Resources,
    box_tables,
    encode_json,
    outline_json,
    plan_resources,
    ranks_table,
    run_json,
    step_json,
)
from commtrace.viewer.overview import critical_tables, part_tables
from commtrace.viewer.what_if import Predict, Question, WhatIfs
from commtrace.viewer.whole_run import slowdown_resources, summarise_with_views

MOST_ROWS: Final = 4_000_000
"""Of the steps that stay in memory; at about 600 bytes a row."""


class Pending(NamedTuple):
    """A resource that is not there yet."""

    text: str  # what is being done, for people
    done: int = 0
    of: int = 0  # 0 if unknown


_READING: Final = Pending("Finding the steps of the run")
_REPLAYING: Final = Pending("Replaying the steps without each slow rank")
_COMPARING: Final = Pending("Comparing it with the other run")

_STEP: Final = re.compile(r"step/(?P<step>-?\d+)(?:\.json|/(?P<table>.+))")

_Value = TypeVar("_Value")
_Answer = bytes | Pending | None


def _when_done(future: Future[_Value], pending: Pending, encode: Callable[[_Value], bytes | None]) -> _Answer:
    return encode(future.result()) if future.done() else pending


@dataclass(slots=True)
class _Passes:
    """How far the passes over a large run are."""

    number: int = 0
    done: int = 0  # steps of this pass
    of: int = 0

    def measured(self, done: int, of: int) -> None:
        if done < self.done or not self.number:
            self.number += 1
        self.done, self.of = done, of


@dataclass(frozen=True, slots=True)
class _OpenRun:
    run: OpenedRun
    drawn: DrawnSteps


@dataclass(frozen=True, slots=True)
class _ReadSteps:
    """Steps that can be drawn: one of a large run, all of any other."""

    analysis: Analysis
    timeline: Timeline

    @property
    def num_rows(self) -> int:
        return sum(len(trace.spans) for trace in self.analysis.run.ranks.values())


class RunView:
    """The resources of docs/viewer-data.md of one run."""

    def __init__(
        self,
        path: Path,
        workers: Workers = ALONE,
        trace_of: Callable[[Timeline, int], bytes] | None = None,
        against: Path | None = None,
        predict: Predict | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            trace_of: returns a step as a file for the Perfetto UI; without it there is no ``step/N/perfetto``.
            against: another run that this one is compared with.
            predict: answers what-if questions; without it there are no answers.

        Raises:
            RunNotFoundError: there is no run at a path.
        """
        self._trace_of = trace_of
        self._what_ifs = WhatIfs(predict) if predict else None
        self._against = find_run_directory(against) if against else None
        self.path = find_run_directory(path)
        self._workers = workers
        self._opened: Future[_OpenRun] = Future()
        self._summary: Future[Summary] = Future()
        self._views: Future[Resources] = Future()
        self._slowdown: Future[Resources] = Future()
        self._comparison: Future[Resources] = Future()
        self._passes = _Passes()
        self._steps: OrderedDict[int, _ReadSteps] = OrderedDict()  # the one that was used last at the end
        self._boxes: tuple[tuple[int, Collection[int] | None], Resources] | None = None  # those asked for last
        self._reading = threading.Lock()  # one step at a time: each takes the memory of a window
        self._size = _recorded_bytes(self.path)
        threading.Thread(target=self._read, name="commtrace-view", daemon=True).start()

    def has_grown(self) -> bool:
        """Return whether more was recorded since the run was read."""
        return _recorded_bytes(self.path) != self._size

    @property
    def told(self) -> Mapping[str, str] | None:
        """Return the state of the job and its first finding, in words; None before the run was summarised."""
        if not self._summary.done() or self._summary.exception() is not None:
            return None
        summary = self._summary.result()
        return {"state": summary.state, "text": next((one.line() for one in summary.findings), "nothing found")}

    def what_if(self, question: Question) -> bytes | None:
        """Return the answer to a question; None where questions are not answered.

        Raises:
            CommtraceError: the run cannot be read or replayed, or cannot have these changes.
        """
        return self._what_ifs.answer(self._opened.result().run, question) if self._what_ifs else None

    def resource(self, name: str, ranks: Collection[int] | None = None) -> bytes | Pending | None:
        """Return a resource; None if there is none of this name.

        Args:
            ranks: of a table of boxes, by index in the outline of its step; None for all.

        Raises:
            CommtraceError: the run cannot be read.
        """
        if name == "run.json":
            return _when_done(self._opened, _READING, lambda opened: encode_json(self._run_json(opened)))
        if name == "summary.json":
            return self._when_summarised(self._summary, lambda summary: encode_json(summary.to_json()))
        if name.startswith(("step/", "plan")):
            return _when_done(self._opened, _READING, lambda opened: self._of_timeline(opened, name, ranks))
        if name.startswith("whatif/"):
            return self._what_ifs.resource(name) if self._what_ifs else None
        if name == "slowdown.json":
            return _when_done(self._slowdown, _REPLAYING, lambda resources: resources.get(name))
        if name == "comparison.json" or name.startswith("other"):
            return _when_done(self._comparison, _COMPARING, lambda resources: resources.get(name))
        return self._when_summarised(self._views, lambda views: views.get(name))

    def _when_summarised(self, future: Future[_Value], encode: Callable[[_Value], bytes | None]) -> _Answer:
        passes = self._passes
        text = f"Summing up all steps, pass {passes.number}" if passes.number > 1 else "Summing up all steps"
        return _when_done(future, Pending(text, passes.done, passes.of), encode)

    # ---- in the thread that reads

    def _read(self) -> None:
        try:
            run = open_run(self.path, None, self._workers)
            if not run.is_in_memory:
                run = replace(run, on_progress=self._passes.measured)
            durations = step_durations(run.aligned, run.steps.used)
            opened = _OpenRun(run, DrawnSteps(durations, steps_to_draw(durations)))
            if durations:
                self._read_step(opened, opened.drawn.preferred[0])
            self._opened.set_result(opened)
            summarised = summarise_with_views(run, is_whole=True)
            self._summary.set_result(summarised.summary)
            self._views.set_result(summarised.views)
            self._slowdown.set_result(slowdown_resources(run, summarised.work))  # minutes for very many ranks
            self._comparison.set_result(self._compare(run))
        except Exception as error:  # whoever asks for a resource gets it
            for future in (self._opened, self._summary, self._views, self._slowdown, self._comparison):
                if not future.done():
                    future.set_exception(error)

    def _compare(self, run: OpenedRun) -> Resources:
        if self._against is None:
            return {}
        return comparison_resources(open_run(self._against, None, self._workers), run)

    # ---- in the threads of requests

    def _run_json(self, opened: _OpenRun) -> dict[str, object]:
        drawn = opened.drawn
        listed = sorted(drawn.preferred)
        others = len(drawn.durations) - len(listed)
        note = f"The list has the typical and the slowest step; {others:,} more can be shown." if others else ""
        stages = {trace.coordinates.get("pp", 0) for trace in opened.run.aligned.ranks.values()}
        title = f"commtrace · {opened.run.recorded.any_metadata.run_id}"
        return run_json(title, drawn, listed, note, has_plan=len(stages) > 1, can_show_all=True)

    def _of_timeline(self, opened: _OpenRun, name: str, ranks: Collection[int] | None) -> bytes | None:
        if name.startswith("plan"):
            return self._plan(opened).get(name)
        asked = _STEP.fullmatch(name)
        if asked is None or (step := int(asked["step"])) not in opened.drawn.durations:
            return None
        read = self._read_step(opened, step)
        timeline, prefix = read.timeline, f"step/{step}"
        match asked["table"]:
            case None:
                return encode_json(step_json(timeline, step, f"{prefix}/outline.json"))
            case "outline.json":
                return encode_json(outline_json(timeline.outline()))
            case "ranks":
                return ranks_table(timeline.bounds(step))
            case "perfetto":
                return None if self._trace_of is None else self._trace_of(timeline, step)
            case "parts":
                return dict(part_tables(read.analysis, timeline, [step])).get(name)
            case "critical":
                return dict(critical_tables(read.analysis, timeline, [step])).get(name)
            case _:
                return self._read_boxes(timeline, step, ranks).get(name)

    def _read_boxes(self, timeline: Timeline, step: int, ranks: Collection[int] | None) -> Resources:
        with self._reading:  # a page asks for all tables of the same ranks at once
            key = (step, ranks)
            if self._boxes is None or self._boxes[0] != key:
                self._boxes = (key, box_tables(timeline.step(step, ranks), f"step/{step}"))
            return self._boxes[1]

    def _plan(self, opened: _OpenRun) -> Resources:
        if not opened.drawn.preferred:
            return {}
        typical = opened.drawn.preferred[0]
        plan = plan_of_steps(self._read_step(opened, typical).analysis, [typical])
        return plan_resources(plan) if plan else {}

    def _read_step(self, opened: _OpenRun, step: int) -> _ReadSteps:
        key = step if not opened.run.is_in_memory else 0
        with self._reading:
            found = self._steps.get(key)
            if found is None:
                analysis = opened.run.analyse_steps([step])
                found = _ReadSteps(analysis, Timeline.of_analysis(analysis))
            self._steps[key] = found
            self._steps.move_to_end(key)
            while len(self._steps) > 1 and sum(one.num_rows for one in self._steps.values()) > MOST_ROWS:
                self._steps.popitem(last=False)
            return found


def _recorded_bytes(path: Path) -> int:
    size = 0
    for directory in rank_directories(path):
        for segment in segment_paths(directory):
            try:
                size += segment.stat().st_size
            except FileNotFoundError:
                continue  # deleted to make room, or replaced by a denser one
    return size
