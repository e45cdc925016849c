// What differs from another run, by size, each difference beside its noise.

import type { Source } from "../data/source";
import { button, byId, element } from "../dom";
import { formatBandwidth, formatMilliseconds, formatPercent } from "../format";
import { type ColumnOf, dataTable } from "../table";

export interface Change {
  before: number | null;
  after: number | null;
  difference: number | null;
  relative: number | null;
  noise: number | null;
  is_real: boolean;
}

/** The resource `comparison.json`: `commtrace compare --json`, and the names of the runs. */
export interface Comparison {
  run_before: string;
  run_after: string;
  steps: { before: number; after: number };
  wall_ns: Change;
  mean_ns: Change; // also of the steps, so that slow ones that are few count
  parts_ns: (Change & { state: string; detail: string })[];
  busbw_gbps: (Change & { role: string; operation: string; group_size: number })[];
  circumstances: { what: string; before: string; after: string }[];
}

/** Shows the comparison, and its verdict beside every view; returns whether there is one. */
export async function showComparison(source: Source, show: () => void): Promise<boolean> {
  const comparison = await source.json<Comparison>("comparison.json");
  if (!comparison) return false;
  const { run_before: before, run_after: after, steps } = comparison;
  const parts = [
    { name: "step", ...comparison.wall_ns },
    { name: "step, mean", ...comparison.mean_ns },
    ...comparison.parts_ns.map((part) => ({ name: [part.state, part.detail].filter(Boolean).join(" "), ...part })),
  ];
  const links = comparison.busbw_gbps.map((link) => ({
    name: `${link.role} ${link.operation} of ${link.group_size}`,
    ...link,
  }));
  byId("comparison").append(
    element("p", verdict(comparison)),
    element("h3", "Time per step, ms"),
    changes(before, after, parts, formatMilliseconds),
    element(
      "p",
      `Medians over ${steps.before} and ${steps.after} steps of the mean over the ranks. Differences beyond the noise are more than chance ` +
        "among the steps of these runs; how much two starts of a job differ is not in it: for that, commtrace compare with several runs of a side.",
      "hint",
    ),
    ...(links.length ? [element("h3", "Bus bandwidth"), changes(before, after, links, formatBandwidth)] : []),
    element("h3", "Versions, environment and layout"),
    comparison.circumstances.length
      ? dataTable(
          [
            { heading: "what differs", text: ({ what }) => what, isWords: true },
            { heading: before, text: (one) => one.before, isWords: true },
            { heading: after, text: (one) => one.after, isWords: true },
          ],
          comparison.circumstances,
        )
      : element("p", "They are the same.", "empty"),
  );
  byId("comparison-section").hidden = false;
  const link = button(verdict(comparison), "Show the comparison", show);
  link.className = "link";
  byId("compared").replaceChildren(link);
  byId("compared").hidden = false;
  return true;
}

export function verdict({
  run_before: before,
  run_after: after,
  wall_ns: median,
  mean_ns: mean,
}: Pick<Comparison, "run_before" | "run_after" | "wall_ns" | "mean_ns">): string {
  const size = (change: Change) => (change.is_real ? Math.abs(change.relative ?? 0) : -1);
  const wall = size(mean) > size(median) ? mean : median;
  const { relative } = wall;
  if (relative === null || wall.noise === null) {
    return `Whether a step of ${after} is slower than one of ${before} cannot be judged: there are too few steps.`;
  }
  if (!wall.is_real) return `A step of ${after} takes as long as one of ${before}: the difference is within the noise.`;
  const step = wall === mean ? "The mean step" : "A step";
  return `${step} of ${after} takes ${formatPercent(Math.abs(relative))} ${relative > 0 ? "longer" : "less"} than one of ${before}.`;
}

function changes<Row extends Change & { name: string }>(
  before: string,
  after: string,
  rows: readonly Row[],
  format: (value: number) => string,
): HTMLElement {
  const text = (value: number | null) => (value === null ? "–" : format(value));
  const column = (heading: string, value: (row: Row) => number | null): ColumnOf<Row> => ({
    heading,
    text: (row) => text(value(row)),
    order: (row) => value(row) ?? -Infinity,
  });
  return dataTable<Row>(
    [
      { heading: "part", text: ({ name }) => name, isWords: true },
      column(before, (row) => row.before),
      column(after, (row) => row.after),
      {
        heading: "difference",
        text: ({ difference }) => (difference !== null && difference > 0 ? "+" : "") + text(difference),
        order: ({ difference }) => Math.abs(difference ?? 0),
      },
      column("noise ±", (row) => row.noise),
      {
        heading: "share",
        text: (row) => ((row.relative ?? 0) > 10 ? "> 10 ×" : formatPercent(row.relative)),
        order: (row) => Math.abs(row.relative ?? 0),
      },
      {
        heading: "beyond the noise",
        text: (row) => (row.is_real ? "yes" : row.noise === null ? "not known" : ""),
        isWords: true,
      },
    ],
    rows,
  );
}
