// The duration of every step over the whole run, with what happened between the steps.

import type uPlot from "uplot";
import { axis, Chart, each, type Points, WHOLE } from "../chart";
import type { Overview } from "../data/overview";
import type { RunData } from "../data/types";
import { button, byId, element } from "../dom";
import { formatClock, formatDuration, formatDurations, formatPercent, joined, stepName } from "../format";
import { type Along, RunSteps } from "../overview/run_steps";
import type { Theme } from "../theme";
import type { Leads } from "./breakdown";

const HEIGHT = innerHeight < 800 ? 84 : 104; // a low window is to show the timeline, too
const OUTLIER = "Longer than the median by 10 % and by five standard deviations";
const MOST_NAMED = 3; // outliers with a button of their own
const MOST_LINES = 60; // events of a kind that are lines; more are ticks

const TIME_STEPS = [
  ...[1, 10, 100].flatMap((unit) => [1e6 * unit, 2e6 * unit, 5e6 * unit]),
  ...[1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400, 604_800].map((s) => s * 1e9),
];

const EVENT_COLOURS: Record<string, string> = {
  restart: "straggler",
  evaluation: "evaluation",
  checkpoint: "checkpoint",
};

export function showSteps(overview: Overview, run: Pick<RunData, "steps">, theme: Theme, leads: Leads): void {
  const steps = new RunSteps(overview);
  if (steps.length < 2) {
    byId("steps-section").hidden = true;
    return;
  }
  const median = overview.terms.median_ns;
  const inTimeline = new Map(run.steps.map((info) => [info.step, info.note]));
  const show = (row: number) => {
    const step = steps.step[row]!;
    const lead = steps.leftOut(row) === "" ? leads.step(step) : null;
    byId("steps-answer").textContent = lead ? "" : `Step ${step} is not in the timeline here: ${whyNot(steps, row)}`;
    lead?.();
  };
  const select = byId<HTMLSelectElement>("steps-along");
  select.append(...(["step", "time"] as const).map((along) => element("option", along)));
  let chart: Chart | null = null;
  const draw = () => {
    chart?.remove();
    chart = drawChart(steps, select.value as Along, median, inTimeline, theme, show);
  };
  select.addEventListener("change", draw);
  draw();
  byId("steps-note").textContent = sentence(steps);
  byId("steps-legend").replaceChildren(...legend(steps, median, inTimeline.size > 0));
  const outliers = steps.outliers().slice(0, MOST_NAMED);
  byId("steps-outliers").replaceChildren(
    ...(outliers.length ? [element("span", "Longest:")] : []),
    ...outliers.map((row) =>
      button(
        `${stepName(steps.step[row]!)}, ${formatDuration(steps.duration[row])}`,
        leads.step(steps.step[row]!) ? "Show this step in the timeline" : "This step is not in the timeline",
        () => show(row),
      ),
    ),
  );
}

function whyNot(steps: RunSteps, row: number): string {
  const reason = steps.leftOut(row);
  return reason ? `it does not count (${reason}).` : `commtrace report RUN --steps ${steps.step[row]} has it.`;
}

function sentence(steps: RunSteps): string {
  const reasons = new Map<string, number>();
  for (let row = 0; row < steps.length; row++) {
    const reason = steps.leftOut(row);
    reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  }
  const outliers = steps.outliers().length;
  const counting = reasons.get("") ?? 0;
  reasons.delete("");
  return joined([
    `${counting.toLocaleString("en-US")} ${counting === 1 ? "step counts" : "steps count"}`,
    `${outliers} ${outliers === 1 ? "outlier" : "outliers"}`,
    ...[...reasons].map(([reason, count]) => `${count.toLocaleString("en-US")} ${reason}`),
  ]);
}

function legend(steps: RunSteps, median: number | null, hasTimeline: boolean): HTMLElement[] {
  const kinds = new Set(steps.events.map(({ kind }) => kind));
  const some = (test: (row: number) => boolean) => Array.from({ length: steps.length }, (_, row) => row).some(test);
  return [
    dot("line-of-steps", "step", "disc"),
    ...(median === null ? [] : [dot("muted", `median ${formatDuration(median)}`, "dashes")]),
    ...(hasTimeline ? [dot("accent", "in the timeline", "ring")] : []),
    ...(some((row) => steps.isOutlier(row)) ? [dot("straggler", "outlier", "diamond", OUTLIER)] : []),
    ...(some((row) => !steps.isUsual(row)) ? [dot("muted", "does not count", "cross")] : []),
    ...[...kinds]
      .filter((kind) => kind in EVENT_COLOURS)
      .map((kind) => dot(EVENT_COLOURS[kind]!, kind, `line ${kind}`)),
  ];
}

function dot(colour: string, label: string, shape: string, title = ""): HTMLElement {
  const item = element("span");
  item.title = title;
  const mark = element("i", "", `mark ${shape}`);
  mark.style.setProperty("--colour", `var(--${colour})`);
  item.append(mark, label);
  return item;
}

function drawChart(
  steps: RunSteps,
  along: Along,
  median: number | null,
  inTimeline: ReadonlyMap<number, string>,
  theme: Theme,
  show: (row: number) => void,
): Chart {
  const rows = steps.order(along);
  const x = rows.map((row) => steps.at(row, along));
  const line = rows.map((row) => (steps.isUsual(row) ? steps.duration[row]! : null));
  const left = (plot: uPlot, index: number) => plot.valToPos(x[index]!, "x");
  const points: Points = {
    count: rows.length,
    place: (plot, index) => ({
      left: left(plot, index),
      top: Math.max(plot.valToPos(steps.duration[rows[index]!]!, "y"), 4),
    }),
    near: (plot, at) => {
      const [first, last] = [plot.posToIdx(at - 24), plot.posToIdx(at + 24)];
      return Array.from({ length: last - first + 1 }, (_, offset) => first + offset);
    },
    note: (index) => noteOf(steps, rows[index]!, median, inTimeline),
    pick: (index) => show(rows[index]!),
  };
  const options = {
    scales: { x: { time: false }, y: { range: rangeOf(median) } },
    axes: [
      along === "step" ? axis(theme, each(String), 34, WHOLE) : axis(theme, each(formatClock), 34, TIME_STEPS),
      axis(theme, formatDurations, 64),
    ],
    series: [{}, { stroke: () => theme.of("line-of-steps"), width: 1.2, spanGaps: true, points: { show: false } }],
  };
  return new Chart(
    byId("steps-chart"),
    theme,
    `Duration of ${steps.length} steps along the ${along === "step" ? "step numbers" : "time of the run"}`,
    HEIGHT,
    options,
    [x, line],
    points,
    (context, plot) => {
      drawEvents(context, plot, steps, along, theme);
      if (median !== null) drawMedian(context, plot, median, theme);
      drawMarks(context, plot, steps, rows, x, inTimeline, theme);
    },
  );
}

/** The axis spans a tenth of the median at least: scatter of a part of a percent is to look like that. */
function rangeOf(median: number | null): uPlot.Range.Function {
  const [least, most] = median === null ? [Infinity, -Infinity] : [0.95 * median, 1.05 * median];
  return (_, low, high) => {
    const [from, to] = [Math.min(low ?? Infinity, least), Math.max(high ?? -Infinity, most)];
    const room = (to - from) / 8; // for the rings around the highest and the lowest point
    return [Math.max(from - room, 0), to + room];
  };
}

function noteOf(
  steps: RunSteps,
  row: number,
  median: number | null,
  inTimeline: ReadonlyMap<number, string>,
): string[] {
  const duration = steps.duration[row]!;
  const excess = median ? duration / median - 1 : 0;
  const here = inTimeline.get(steps.step[row]!);
  return [
    `${stepName(steps.step[row]!)} · ${formatDuration(duration)}`,
    ...(median ? [`${excess < 0 ? "−" : "+"}${formatPercent(Math.abs(excess))} compared with the median`] : []),
    ...(steps.isOutlier(row) ? ["outlier"] : []),
    ...(steps.leftOut(row) ? [`does not count: ${steps.leftOut(row)}`] : []),
    ...(here === undefined || steps.leftOut(row)
      ? []
      : [here ? `in the timeline: the ${here} one` : "in the timeline"]),
  ];
}

function drawEvents(c: CanvasRenderingContext2D, plot: uPlot, steps: RunSteps, along: Along, theme: Theme): void {
  const { left, top, width, height } = plot.bbox;
  for (const [kind, colour] of Object.entries(EVENT_COLOURS)) {
    const places = steps.events
      .filter((event) => event.kind === kind)
      .map((event) => plot.valToPos(steps.placeOf(event, along), "x", true))
      .filter((place) => place >= left && place <= left + width);
    const length = places.length > MOST_LINES ? 10 * devicePixelRatio : height;
    c.strokeStyle = theme.of(colour);
    c.lineWidth = (kind === "restart" ? 2 : 1) * devicePixelRatio;
    c.setLineDash(kind === "restart" ? [] : kind === "evaluation" ? [6, 3] : [2, 3]);
    c.beginPath();
    for (const place of places) {
      c.moveTo(place, top + height);
      c.lineTo(place, top + height - length);
    }
    c.stroke();
  }
  c.setLineDash([]);
}

function drawMedian(c: CanvasRenderingContext2D, plot: uPlot, median: number, theme: Theme): void {
  const { left, width } = plot.bbox;
  const y = plot.valToPos(median, "y", true);
  c.strokeStyle = theme.of("muted");
  c.lineWidth = devicePixelRatio;
  c.setLineDash([4, 4]);
  c.beginPath();
  c.moveTo(left, y);
  c.lineTo(left + width, y);
  c.stroke();
  c.setLineDash([]);
}

// The line holds the steps; marks are those that matter, each once per pixel.
function drawMarks(
  c: CanvasRenderingContext2D,
  plot: uPlot,
  steps: RunSteps,
  rows: readonly number[],
  x: readonly number[],
  inTimeline: ReadonlyMap<number, string>,
  theme: Theme,
): void {
  const { min = 0, max = 0 } = plot.scales.x as { min?: number; max?: number };
  const few = plot.bbox.width / devicePixelRatio / 6;
  const visible = x.reduce((count, place) => count + Number(place >= min && place <= max), 0);
  const seen = new Set<number>();
  const size = 4 * devicePixelRatio;
  c.lineWidth = 1.5 * devicePixelRatio;
  rows.forEach((row, index) => {
    if (x[index]! < min || x[index]! > max) return;
    const [outlier, usual] = [steps.isOutlier(row), steps.isUsual(row)];
    const here = steps.leftOut(row) === "" && inTimeline.has(steps.step[row]!);
    if (usual && !outlier && !here && visible > few) return;
    const left = plot.valToPos(x[index]!, "x", true);
    const top = Math.max(plot.valToPos(steps.duration[row]!, "y", true), plot.bbox.top + size);
    const pixel = Math.round(left) * 65_536 + Math.round(top);
    if (seen.has(pixel)) return;
    seen.add(pixel);
    if (!usual) cross(c, left, top, size, theme.of("muted"));
    else if (outlier) diamond(c, left, top, size * 1.3, theme.of("straggler"));
    else circle(c, left, top, size * 0.6, theme.of("line-of-steps"), true);
    if (here) circle(c, left, top, size * 1.6, theme.of("accent"), false);
  });
}

function cross(c: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string): void {
  c.strokeStyle = colour;
  c.beginPath();
  c.moveTo(x - size, y - size);
  c.lineTo(x + size, y + size);
  c.moveTo(x - size, y + size);
  c.lineTo(x + size, y - size);
  c.stroke();
}

function diamond(c: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string): void {
  c.fillStyle = colour;
  c.beginPath();
  c.moveTo(x, y - size);
  c.lineTo(x + size, y);
  c.lineTo(x, y + size);
  c.lineTo(x - size, y);
  c.fill();
}

function circle(
  c: CanvasRenderingContext2D,
  x: number,
  y: number,
  radius: number,
  colour: string,
  filled: boolean,
): void {
  c.fillStyle = c.strokeStyle = colour;
  c.beginPath();
  c.arc(x, y, radius, 0, 2 * Math.PI);
  if (filled) c.fill();
  else c.stroke();
}
