// The wall time of the whole run by its parts.

import { partsLegend, stackedBar } from "../bars";
import type { Summary } from "../data/types";
import { byId } from "../dom";
import { formatDuration, formatPercent } from "../format";
import { dataTable } from "../table";

const PARTS: readonly (readonly [key: string, name: string, colour: string])[] = [
  ["training", "training steps", "useful"],
  ["repeated", "steps that were done again", "repeated"],
  ["evaluation", "evaluation", "evaluation"],
  ["checkpoint", "checkpoints", "checkpoint"],
  ["loading", "loading data between steps", "data"],
  ["start", "start", "start"],
  ["restart", "restarts", "straggler"],
  ["unknown", "not known", "other"],
];

/** Hides the section for a report of some steps, which has no budget. */
export function showBudget({ run_budget: budget }: Summary, onRank: (rank: number) => void): void {
  const section = byId("budget-section");
  section.hidden = !budget?.wall_ns;
  if (!budget?.wall_ns) return;
  const wall = budget.wall_ns;
  const parts = PARTS.map(([key, name, colour]) => ({
    name,
    colour,
    ns: Number(budget[`${key}_ns`] ?? 0),
    hatched: key === "unknown",
  })).filter(({ ns }) => ns > 0);
  const attempts = budget.attempts > 1 ? ` in ${budget.attempts} attempts` : "";
  byId("run-budget").textContent =
    `Whole run: ${formatDuration(wall)}${attempts}, goodput ${formatPercent(budget.goodput)} ` +
    "(training steps that were kept). Mean of the ranks.";
  const bar = stackedBar(
    parts,
    wall,
    (part) => `${part.name}: ${formatDuration(part.ns)}, ${formatPercent(part.ns / wall)}`,
  );
  bar.role = "img";
  bar.ariaLabel = parts.map(({ name, ns }) => `${name} ${formatPercent(ns / wall)}`).join(", ");
  byId("run-budget-bar").replaceChildren(bar, partsLegend(parts, wall));
  byId("run-budget-ranks").addEventListener(
    "toggle",
    () =>
      byId("run-budget-table").replaceChildren(
        dataTable(
          [
            { heading: "rank", text: ({ rank }) => `rank ${rank}`, order: ({ rank }) => rank ?? 0, isWords: true },
            ...parts.map(({ name }) => {
              const key = `${PARTS.find((part) => part[1] === name)![0]}_ns`;
              return {
                heading: name,
                text: (rank: Record<string, number>) => formatDuration(rank[key]),
                order: (rank: Record<string, number>) => rank[key] ?? 0,
              };
            }),
          ],
          budget.ranks,
          ({ rank }) => onRank(rank!),
        ),
      ),
    { once: true },
  );
}
