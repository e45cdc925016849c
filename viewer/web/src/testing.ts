// Small steps for tests: columns from rows.

import { Columns } from "./data/columns";
import type { Outline, Rank } from "./data/types";
import { Step } from "./timeline/step";

export type Row = Record<string, number>;

export function columnsOf(names: readonly string[], rows: readonly Row[]): Columns {
  const columns = names.map((name) => [name, Float64Array.from(rows, (row) => row[name] ?? -1)] as const);
  return new Columns(rows.length, new Map(columns));
}

export function rankOf(rank: number, coordinates: Record<string, number> = {}, host = "node0"): Rank {
  const lanes = [{ role: "dp", ranks: [0, 1], group: "dp", label: "dp · 0, 1" }];
  return { rank, host, coordinates, label: `rank ${rank} · ${host}`, lanes };
}

export function outlineOf(ranks: Rank[]): Outline {
  return {
    residual_ns: { p50: 1, p99: 2, max: 3 },
    kinds: ["step", "forward", "backward", "optimizer", "data"],
    states: ["wait", "transfer", "bubble"],
    timings: ["host"],
    roles: ["dp", "pp"],
    names: ["forward", "all_reduce", "attention"],
    ranks,
  };
}

export interface Boxes {
  work?: Row[];
  stalls?: Row[];
  host?: Row[];
  communication?: Row[];
}

/** A step of 100 ns on all ranks. Each table has a `rank` and is sorted by it. */
export function stepOf(
  ranks: Rank[],
  { work = [], stalls = [], host = [], communication = [] }: Boxes,
  outline: Outline = outlineOf(ranks),
): Step {
  const of = (names: string[], rows: Row[]) => columnsOf(["rank", "start", "duration", ...names], rows);
  const stalled = (rank: number) => stalls.reduce((sum, stall) => sum + (stall.rank === rank ? stall.duration! : 0), 0);
  const inStep = columnsOf(
    ["rank", "start", "end", "own", "has_boxes"],
    ranks.map((_, rank) => ({ rank, start: 0, end: 100, own: 100 - stalled(rank), has_boxes: 1 })),
  );
  const step = new Step("step/7", 7, 100, outline, inStep);
  const tables = {
    work: of(["kind", "name", "microbatch", "chunk", "stage", "depth"], work),
    stalls: of(["state", "role", "communication", "microbatch", "depth"], stalls),
    host: of(["kind", "name"], host),
    communication: of(
      [
        "name",
        "lane",
        "sublane",
        "bytes",
        "peer",
        "seq",
        "microbatch",
        "wait",
        "transfer",
        "join",
        "last",
        "is_async",
        "timing",
        "start_exact",
        "end_exact",
        "transfer_exact",
        "finished",
      ],
      communication,
    ),
  };
  step.add([...ranks.keys()], tables);
  return step;
}
