// What is longer in one step than in another, by part of the step and by rank.

import type { Columns } from "../data/columns";

export interface PartDifference {
  name: string;
  ns: number; // in the step, mean of the ranks
  before: number; // in the other one
}

export interface RankDifference {
  rank: number; // index in the outline
  more: number; // ns of its own work and transfers, waiting for others left out
  part: string; // the part that is longer most
  partMore: number;
}

export interface StepDifference {
  parts: PartDifference[]; // the longest more first
  ranks: RankDifference[];
  leaders: RankDifference[]; // ranks that stand out of the others; empty where all are alike
}

const WAITS = new Set(["exposed wait", "bubble"]);
const MOST_LEADERS = 4;
const LIKE_THE_FIRST = 0.8;

/** Compares two tables of parts: a row per rank, a column per state. Ranks of one step only do not count. */
export function difference(step: Columns, other: Columns): StepDifference {
  const states = [...new Set([...step.names, ...other.names])].filter((name) => name !== "rank");
  const rowOf = new Map(Array.from(other.of("rank"), (rank, row) => [rank, row]));
  const pairs = Array.from(step.of("rank"), (rank, row) => ({ rank, row, before: rowOf.get(rank) ?? -1 })).filter(
    ({ before }) => before >= 0,
  );
  const at = (table: Columns, state: string, row: number) => (table.has(state) ? table.of(state)[row]! : 0);
  const mean = (table: Columns, state: string, of: "row" | "before") =>
    pairs.reduce((sum, pair) => sum + at(table, state, pair[of]), 0) / Math.max(pairs.length, 1);
  const parts = states
    .map((state) => ({ name: partName(state), ns: mean(step, state, "row"), before: mean(other, state, "before") }))
    .sort((a, b) => b.ns - b.before - (a.ns - a.before));
  const own = states.filter((state) => !WAITS.has(kindOf(state)));
  const ranks = pairs
    .map(({ rank, row, before }) => {
      const more = own.map((state) => at(step, state, row) - at(other, state, before));
      const longest = more.reduce((best, ns, index) => (ns > more[best]! ? index : best), 0);
      return {
        rank,
        more: more.reduce((sum, ns) => sum + ns, 0),
        part: partName(own[longest] ?? ""),
        partMore: more[longest] ?? 0,
      };
    })
    .sort((a, b) => b.more - a.more);
  const most = ranks[0]?.more ?? 0;
  const leaders = ranks.filter(({ more }) => most > 0 && more >= LIKE_THE_FIRST * most);
  const standOut = leaders.length <= MOST_LEADERS && leaders.length < ranks.length;
  return { parts, ranks, leaders: standOut ? leaders : [] };
}

function kindOf(state: string): string {
  return state.slice(0, state.indexOf("/"));
}

/** `exposed wait/dp` is called `dp wait`, `compute/forward` `forward`, `bubble/` `pipeline bubble`. */
export function partName(state: string): string {
  const [kind = "", detail = ""] = [kindOf(state), state.slice(state.indexOf("/") + 1)];
  if (kind.startsWith("exposed ") && detail) return `${detail} ${kind.slice("exposed ".length)}`;
  if (kind === "compute") return detail === "other" ? "other compute" : detail;
  if (kind === "bubble") return "pipeline bubble";
  return kind === "other" ? "in no span" : kind;
}
