// Bandwidth by message size: bins of calls, and the curve of the best seen within nodes and between them.

import type uPlot from "uplot";
import { swatch } from "../bars";
import { axis, Chart, each, logTicks, type Points } from "../chart";
import type { Overview } from "../data/overview";
import { byId, element } from "../dom";
import { formatBytes, formatPercent } from "../format";
import { type Bin, bestSeen, binsOf, type Reach } from "../overview/bandwidth";
import { type ColumnOf, dataTable } from "../table";
import type { Theme } from "../theme";
import type { Leads } from "./breakdown";

const HEIGHT = 320;
const SIZE = 5; // of a mark

/** Hides the section where no call has a bandwidth. */
export function showBandwidth(overview: Overview, theme: Theme, leads: Leads): void {
  const bins = binsOf(overview).filter(({ median }) => median > 0);
  byId("bandwidth-section").hidden = !bins.length;
  if (!bins.length) return;
  const best = { within: bestSeen(bins, "within"), between: bestSeen(bins, "between"), unknown: [] };
  const reaches = (["within", "between", "unknown"] as const).filter((reach) =>
    bins.some((bin) => bin.reach === reach),
  );
  const roles = [...new Set(bins.map(({ role }) => role))].sort();
  byId("bandwidth-legend").replaceChildren(
    ...roles.map((role) => swatch(theme.role(role), role)),
    ...reaches.map((reach) => element("span", `${SYMBOLS[reach]} ${NODES[reach]}`)),
    ...(bins.some((bin) => !bin.isMatched) ? [element("span", "hollow: not matched, with waits")] : []),
    ...(bins.some((bin) => bin.isBound) ? [element("span", "hollow, ≥: starts or ends are bounds")] : []),
    element("span", "lines: the best seen"),
  );
  const find = (bin: Bin) => leads.find(bin.operation);
  drawChart(bins, best, theme, find);
  byId("bandwidth-table").replaceChildren(table(bins, best, find));
  const { uncertain_calls: uncertain } = overview.terms;
  byId("bandwidth-note").textContent =
    "Each mark is the median bus bandwidth of the calls of one role, operation and group size whose bytes share a power of two; " +
    "waiting for other ranks is left out where all of them were recorded. A click finds such calls in the step of the timeline. Drag to zoom, double click to see all." +
    (uncertain ? ` Left out: ${uncertain} calls between nodes that were quicker than the clocks' error.` : "");
}

const NODES: Record<Reach, string> = { within: "within a node", between: "between nodes", unknown: "nodes unknown" };
const SYMBOLS: Record<Reach, string> = { within: "●", between: "■", unknown: "▲" };

function name(bin: Bin): string {
  return `${bin.role} ${bin.operation} of ${bin.groupSize} ranks, ${NODES[bin.reach]}`;
}

function rate(bytesPerSecond: number): string {
  return `${formatBytes(bytesPerSecond)}/s`;
}

/** A bandwidth of a bin, marked if it is a lower bound. */
function seen(bin: Bin, bytesPerSecond: number): string {
  return (bin.isBound ? "≥" : "") + rate(bytesPerSecond);
}

type Best = Record<Reach, { bytes: number; best: number }[]>;

/** Share of the best seen at a size; null where none was. */
function shareOfBest(bin: Bin, best: Best): number | null {
  const size = Math.floor(Math.log2(bin.bytes));
  const same = best[bin.reach].find(({ bytes }) => Math.floor(Math.log2(bytes)) === size);
  return same ? bin.median / same.best : null;
}

function drawChart(bins: readonly Bin[], best: Best, theme: Theme, find: (bin: Bin) => void): void {
  const x = [...new Set(bins.map(({ bytes }) => bytes))].sort((a, b) => a - b);
  const at = (reach: Reach) => {
    const known = new Map(best[reach].map((one) => [one.bytes, one.best]));
    return x.map((bytes) => known.get(bytes) ?? null);
  };
  const values = bins.flatMap((bin) => [bin.median, bin.best]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points: Points = {
    count: bins.length,
    place: (plot, index) => ({
      left: plot.valToPos(bins[index]!.bytes, "x"),
      top: plot.valToPos(bins[index]!.median, "y"),
    }),
    note: (index) => {
      const bin = bins[index]!;
      const share = shareOfBest(bin, best);
      return [
        name(bin),
        `${formatBytes(bin.bytes)} a call, ${bin.calls.toLocaleString("en-US")} calls`,
        `median ${seen(bin, bin.median)}, best ${seen(bin, bin.best)}`,
        share === null ? "" : `${formatPercent(share)} of the best seen at this size`,
        bin.isMatched ? "" : "not matched on all members: waits are part of the time",
        bin.isBound ? "start or end is a bound: at least this" : "",
      ].filter(Boolean);
    },
    pick: (index) => find(bins[index]!),
  };
  const curve = { width: 1.5, spanGaps: true, points: { show: false } };
  new Chart(
    byId("bandwidth-chart"),
    theme,
    `Bandwidth of ${bins.length} kinds of calls by message size`,
    HEIGHT,
    {
      scales: {
        x: { time: false, distr: 3, range: () => [x[0]! / 1.6, x.at(-1)! * 1.6] },
        y: { distr: 3, range: () => [low / 1.6, high * 1.6] },
      },
      axes: [logAxis(axis(theme, each(formatBytes), 34)), logAxis(axis(theme, each(rate), 76))],
      series: [
        {},
        { ...curve, stroke: () => theme.of("text") },
        { ...curve, stroke: () => theme.of("text"), dash: [6, 4] },
      ],
    },
    [x, at("within"), at("between")],
    points,
    (context, plot) => {
      for (const bin of bins) drawMark(context, plot, bin, theme.of(theme.role(bin.role)));
    },
  );
}

function logAxis(axis: uPlot.Axis): uPlot.Axis {
  return { ...axis, splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits };
}

function drawMark(c: CanvasRenderingContext2D, plot: uPlot, bin: Bin, colour: string): void {
  const [x, y] = [plot.valToPos(bin.bytes, "x", true), plot.valToPos(bin.median, "y", true)];
  const size = SIZE * devicePixelRatio;
  c.beginPath();
  if (bin.reach === "within") c.arc(x, y, size, 0, 2 * Math.PI);
  else if (bin.reach === "between") c.rect(x - size, y - size, 2 * size, 2 * size);
  else {
    c.moveTo(x, y - size);
    c.lineTo(x + size, y + size);
    c.lineTo(x - size, y + size);
    c.closePath();
  }
  c.fillStyle = c.strokeStyle = colour;
  c.lineWidth = 1.5 * devicePixelRatio;
  if (bin.isMatched && !bin.isBound) c.fill();
  else c.stroke();
}

function table(bins: readonly Bin[], best: Best, find: (bin: Bin) => void): HTMLElement {
  const number = (heading: string, value: (bin: Bin) => number, text: (value: number) => string): ColumnOf<Bin> => ({
    heading,
    text: (bin) => text(value(bin)),
    order: value,
  });
  return dataTable(
    [
      { heading: "role", text: (bin) => bin.role, isWords: true },
      { heading: "operation", text: (bin) => bin.operation, isWords: true },
      { heading: "nodes", text: (bin) => NODES[bin.reach], isWords: true },
      number("group size", (bin) => bin.groupSize, String),
      number("bytes of a call", (bin) => bin.bytes, formatBytes),
      number("calls", (bin) => bin.calls, String),
      {
        heading: "median",
        text: (bin) => seen(bin, bin.median) + (bin.isMatched ? "" : "*"),
        order: (bin) => bin.median,
      },
      { heading: "best", text: (bin) => seen(bin, bin.best), order: (bin) => bin.best },
      {
        heading: "of the best seen",
        text: (bin) => formatPercent(shareOfBest(bin, best)),
        order: (bin) => shareOfBest(bin, best) ?? -1,
      },
    ],
    bins,
    find,
  );
}
