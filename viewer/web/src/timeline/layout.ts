import type { Rank } from "../data/types";
import type { Step } from "./step";

export const GUTTER = 188;
export const RULER = 24;
export const MAIN = 30;
export const LANE = 14;
export const HEADING = 20;
export const GAP = 6;

/** Above this number of ranks a group shows its median and its slowest rank until it is opened. */
export const MANY_RANKS = 24;

export const GROUPINGS = ["stage", "host", "replica", "tensor group", "none"] as const;
export type Grouping = (typeof GROUPINGS)[number];

export interface LaneRow {
  lane: number; // index among the lanes of the rank
  y: number;
  height: number;
}

export interface RankRow {
  type: "rank";
  rank: number;
  y: number;
  height: number;
  lanes: LaneRow[];
  note: string; // "median", "slowest"
}

export interface GroupRow {
  type: "group";
  key: string;
  label: string;
  y: number;
  height: number;
  ranks: number[];
  open: boolean;
}

export type Row = RankRow | GroupRow;

export interface Layout {
  rows: Row[];
  height: number;
}

/** Name of a rank's group; empty where it has no place in that grouping. */
export function groupOf(rank: Rank, grouping: Grouping): string {
  const { coordinates: at } = rank;
  switch (grouping) {
    case "stage":
      return at.pp === undefined ? "" : `stage ${at.pp}`;
    case "host":
      return rank.host;
    case "replica":
      return at.dp === undefined ? "" : `replica ${at.dp}`;
    case "tensor group":
      return at.tp === undefined
        ? ""
        : ["pp", "dp", "cp", "ep"]
            .filter((name) => at[name])
            .map((name) => `${name}${at[name]}`)
            .join(" ") || "tensor group 0";
    case "none":
      return "";
  }
}

/** The groups of ranks of a step, in the order of their first ranks. One unnamed group if nothing is grouped. */
export function groupsOf(step: Step, grouping: Grouping): Map<string, number[]> {
  const groups = new Map<string, number[]>();
  step.outline.ranks.forEach((rank, index) => {
    if (!step.has(index)) return;
    const key = groupOf(rank, grouping);
    const known = groups.get(key);
    if (known) known.push(index);
    else groups.set(key, [index]);
  });
  return new Map([...groups].sort(([, first], [, second]) => compare(step, grouping, first[0]!, second[0]!)));
}

function compare(step: Step, grouping: Grouping, first: number, second: number): number {
  const name = grouping === "stage" ? "pp" : grouping === "replica" ? "dp" : "";
  const at = (rank: number) => step.outline.ranks[rank]!.coordinates[name] ?? 0;
  return at(first) - at(second) || first - second;
}

/** The median and the slowest rank of a group: by own work in the step, waiting left out. */
export function representatives(step: Step, ranks: readonly number[]): { median: number; slowest: number } {
  const byWork = [...ranks].sort((a, b) => step.busy(a) - step.busy(b) || a - b);
  return { median: byWork[(byWork.length - 1) >> 1]!, slowest: byWork.at(-1)! };
}

/** The grouping to begin with: by stage if there are several; none for few ranks. */
export function usualGrouping(ranks: readonly Rank[]): Grouping {
  if (ranks.length <= MANY_RANKS) return "none";
  const stages = new Set(ranks.map((rank) => rank.coordinates.pp));
  if (stages.size > 1) return "stage";
  return new Set(ranks.map((rank) => rank.host)).size > 1 ? "host" : "none";
}

/** Places the rows of a step from top to bottom. A closed group shows the ranks in `kept`, by their numbers, too. */
export function layOut(
  step: Step,
  grouping: Grouping,
  openGroups: ReadonlySet<string>,
  openRanks: ReadonlySet<number>,
  kept: ReadonlySet<number> = new Set(),
): Layout {
  const rows: Row[] = [];
  let y = 0;
  const addRank = (rank: number, note: string) => {
    const row: RankRow = { type: "rank", rank, y, height: 0, lanes: [], note };
    y += MAIN;
    if (openRanks.has(rank)) {
      laneDepths(step, rank).forEach((depth, lane) => {
        row.lanes.push({ lane, y, height: LANE * depth });
        y += LANE * depth;
      });
    }
    y += GAP;
    row.height = y - row.y;
    rows.push(row);
  };
  for (const [key, ranks] of groupsOf(step, grouping)) {
    if (grouping === "none") {
      for (const rank of ranks) addRank(rank, "");
      continue;
    }
    const open = openGroups.has(key) || ranks.length <= 2;
    rows.push({
      type: "group",
      key,
      label: `${key || "other ranks"} · ${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"}`,
      y,
      height: HEADING,
      ranks,
      open,
    });
    y += HEADING;
    if (open) for (const rank of ranks) addRank(rank, "");
    else {
      const { median, slowest } = representatives(step, ranks);
      const isAsked = (rank: number) => openRanks.has(rank) || kept.has(step.outline.ranks[rank]!.rank);
      const extra = ranks.filter((rank) => isAsked(rank) && rank !== median && rank !== slowest);
      addRank(median, "median");
      for (const rank of extra) addRank(rank, "");
      if (slowest !== median) addRank(slowest, "slowest");
    }
  }
  return { rows, height: y };
}

function laneDepths(step: Step, rank: number): number[] {
  const depths = new Array<number>(step.outline.ranks[rank]!.lanes.length).fill(1);
  const columns = step.columns("communication", rank);
  const [lane, sublane] = [columns.of("lane"), columns.of("sublane")];
  for (let row = 0; row < columns.length; row++)
    depths[lane[row]!] = Math.max(depths[lane[row]!] ?? 1, sublane[row]! + 1);
  return depths;
}
