// What the replay says: how much longer steps take than with ideal durations, and what they owe to.

import { labelledSelect } from "../controls";
import type { Source } from "../data/source";
import { byId, element } from "../dom";
import { formatPercent, formatRanks } from "../format";
import { dataTable } from "../table";

/** The resource `slowdown.json`: the same names as in `commtrace straggler --json`. */
export interface Slowdown {
  S: number;
  S_by_step: Record<string, number>;
  S_by_operation: Record<string, number>;
  S_by_stage: Record<string, number>;
  S_by_dp_rank: Record<string, number>;
  S_by_worker: Record<string, number>;
  slowest_workers: number[];
  M_W: number | null;
  M_S: number | null;
}

const SLICES = {
  operation: "S_by_operation",
  stage: "S_by_stage",
  "dp rank": "S_by_dp_rank",
  rank: "S_by_worker",
  step: "S_by_step",
} as const;

type Slice = keyof typeof SLICES;

interface Row {
  name: string;
  slowdown: number;
}

const MOST_ROWS = 1024;

export async function showSlowdown(source: Source, onRank: (rank: number) => void): Promise<void> {
  const slowdown = await source.json<Slowdown>("slowdown.json");
  if (!slowdown) return;
  const by = labelledSelect("slowdown-by", "Slowdown S by", Object.keys(SLICES));
  const table = element("div");
  const show = () => {
    const slice = by.node.value as Slice;
    const rows = slices(slowdown, slice);
    const shown = rows.slice(0, MOST_ROWS);
    table.replaceChildren(
      dataTable<Row>(
        [
          { heading: slice, text: ({ name }) => name, order: ({ name }) => Number(name) || 0, isWords: true },
          { heading: "S", text: (row) => row.slowdown.toFixed(4), order: (row) => row.slowdown },
          { heading: "longer steps", text: (row) => formatPercent(row.slowdown - 1), order: (row) => row.slowdown },
        ],
        shown,
        slice === "rank" ? ({ name }) => onRank(Number(name)) : undefined,
      ),
      ...(rows.length > shown.length ? [element("p", `The ${MOST_ROWS} largest of ${rows.length}.`, "hint")] : []),
    );
  };
  by.node.addEventListener("change", show);
  const bar = element("div", "", "bar");
  bar.append(by.label);
  const details = element("details");
  details.append(
    element("summary", "What a replay of the steps says of each operation, stage and rank"),
    element("p", sentence(slowdown), "hint"),
    bar,
    table,
  );
  byId("slowdown").append(details);
  show();
}

export function slices(slowdown: Slowdown, slice: Slice): Row[] {
  return Object.entries(slowdown[SLICES[slice]])
    .map(([name, own]) => ({ name, slowdown: own }))
    .sort((a, b) => b.slowdown - a.slowdown);
}

export function sentence({ S, M_W, M_S, slowest_workers: slowest }: Slowdown): string {
  const gain = (share: number | null, what: string) =>
    share === null ? "" : ` With ${what} as fast as ideal, ${formatPercent(share)} of that would be gone.`;
  const ranks = `the slowest ${slowest.length === 1 ? "rank" : "ranks"} (${formatRanks(slowest)})`;
  return (
    `S = ${S.toFixed(3)}: a step takes ${formatPercent(S - 1)} longer than with ideal durations (work as the mean of the same work, ` +
    `transfers as the median of the same transfers).${gain(M_W, ranks)}${gain(M_S, "the last stage")} ` +
    "S of a part: only that part has its own durations, all else is ideal."
  );
}
