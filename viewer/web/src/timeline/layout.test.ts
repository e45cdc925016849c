import { describe, expect, it } from "vitest";
import { rankOf, stepOf } from "../testing";
import { type Grouping, groupsOf, layOut, representatives, usualGrouping } from "./layout";

const RANKS = [0, 1, 2, 3, 4, 5].map((rank) => rankOf(rank, { pp: rank % 2, dp: rank >> 1 }, `node${rank >> 2}`));
const STALLED = [40, 10, 30, 50, 20, 60]; // by rank: the others work for the rest of 100 ns
const STEP = stepOf(RANKS, {
  stalls: STALLED.map((duration, rank) => ({ rank, start: 0, duration, state: 0, role: 0, depth: 0 })),
});

function shown(grouping: Grouping, open: string[] = []): string[] {
  return layOut(STEP, grouping, new Set(open), new Set()).rows.map((row) =>
    row.type === "group" ? row.label : `${row.rank} ${row.note}`.trim(),
  );
}

describe("rows", () => {
  it("are grouped by stage, host or replica", () => {
    expect([...groupsOf(STEP, "stage")]).toEqual([
      ["stage 0", [0, 2, 4]],
      ["stage 1", [1, 3, 5]],
    ]);
    expect([...groupsOf(STEP, "host").keys()]).toEqual(["node0", "node1"]);
    expect([...groupsOf(STEP, "replica").values()]).toEqual([
      [0, 1],
      [2, 3],
      [4, 5],
    ]);
  });

  it("show the median and the slowest rank of a closed group", () => {
    expect(representatives(STEP, [0, 2, 4])).toEqual({ median: 2, slowest: 4 });
    expect(shown("stage")).toEqual([
      "stage 0 · 3 ranks",
      "2 median",
      "4 slowest",
      "stage 1 · 3 ranks",
      "3 median",
      "1 slowest",
    ]);
  });

  it("show all ranks of an open group", () => {
    expect(shown("stage", ["stage 1"]).slice(3)).toEqual(["stage 1 · 3 ranks", "1", "3", "5"]);
  });

  it("are one list without grouping", () => {
    expect(shown("none")).toEqual(["0", "1", "2", "3", "4", "5"]);
  });

  it("lie below one another", () => {
    const { rows, height } = layOut(STEP, "stage", new Set(), new Set([2]));
    for (const [index, row] of rows.slice(1).entries()) expect(row.y).toBe(rows[index]!.y + rows[index]!.height);
    expect(height).toBe(rows.at(-1)!.y + rows.at(-1)!.height);
    expect(rows.find((row) => row.type === "rank" && row.lanes.length)).toMatchObject({ rank: 2 });
  });

  it("are grouped from the start where ranks are many", () => {
    const many = Array.from({ length: 64 }, (_, rank) => rankOf(rank, { pp: rank % 4 }));
    expect([usualGrouping(RANKS), usualGrouping(many)]).toEqual(["none", "stage"]);
  });
});
