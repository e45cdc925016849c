import type { ModuleTime, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatPercent } from "../format";
import { type ColumnOf, dataTable } from "../table";

/** Hides the section where no modules were recorded. */
export function showModules({ modules, run }: Summary, onRank: (rank: number) => void): void {
  byId("modules-section").hidden = !modules.length;
  if (!modules.length) return;
  const steps = run.steps.count || 1;
  const time = (heading: string, value: (row: ModuleTime) => number): ColumnOf<ModuleTime> => ({
    heading,
    text: (row) => formatDuration(value(row)),
    order: value,
  });
  const slowest = (row: ModuleTime) =>
    row.slowest_rank === null || row.slowest_rank_slower === null
      ? "–"
      : `rank ${row.slowest_rank}, +${formatPercent(row.slowest_rank_slower)}`;
  byId("modules").replaceChildren(
    dataTable(
      [
        {
          heading: "module",
          text: (row) => (row.modules > 1 ? `${row.module} (${row.modules})` : row.module),
          isWords: true,
        },
        { heading: "calls", text: (row) => String(row.calls), order: (row) => row.calls },
        time("forward", (row) => row.forward_ns / steps),
        time("backward", (row) => row.backward_ns / steps),
        ...(modules.some((row) => row.recompute_ns) ? [time("recompute", (row) => row.recompute_ns / steps)] : []),
        time("exposed in it", (row) => row.exposed_ns / steps),
        time("median of a rank", (row) => row.median_step_ns),
        time("p95", (row) => row.p95_step_ns),
        { heading: "slowest rank", text: slowest, order: (row) => row.slowest_rank_slower ?? -1 },
      ],
      modules,
      (row) => row.slowest_rank !== null && onRank(row.slowest_rank),
    ),
    element(
      "p",
      "Forward, backward and exposed: per step, summed over the ranks, nested modules included. Median and p95: of forward and " +
        "backward of one rank in one step. The number in brackets counts modules that differ only in a number. A click on a row " +
        "shows its slowest rank.",
      "hint",
    ),
  );
}
