import { describe, expect, it } from "vitest";
import type { RankTimes } from "../data/types";
import { columnsOf } from "../testing";
import { bounded, colourRange, QUANTITIES, RankMap, viewOfFinding } from "./grid";

const [SLOWNESS, COMPUTE, BANDWIDTH] = ["slowness", "compute", "bandwidth"].map(
  (name) => QUANTITIES.find((quantity) => quantity.name === name)!,
) as [(typeof QUANTITIES)[0], (typeof QUANTITIES)[0], (typeof QUANTITIES)[0]];

const BLOCKS = [
  { first: 0, last: 1 },
  { first: 2, last: 2 },
];

// Four ranks, 2 (dp) × 2 (pp), over three steps in two blocks; rank 3 is slow in the second one.
function map(): RankMap {
  const rows = [0, 1, 2, 3].flatMap((rank) =>
    BLOCKS.map((_, block) => ({
      steps: 2 - block,
      compute: 10 * (rank + 1),
      work: rank === 3 && block === 1 ? 150 : 100,
      typical_work: 100,
      bus_bytes: rank === 0 ? 0 : 600,
      bus_ns: rank === 0 ? 0 : 100 * rank,
    })),
  );
  const columns = columnsOf(["steps", "compute", "work", "typical_work", "bus_bytes", "bus_ns"], rows);
  const ranks = [0, 1, 2, 3].map((rank) => ({
    rank,
    host: rank < 2 ? "a" : "b",
    coordinates: { dp: rank % 2, pp: Math.floor(rank / 2), tp: 0 },
  })) as unknown as RankTimes[];
  return new RankMap(
    { ranks: [0, 1, 2, 3], blocks: BLOCKS },
    columns,
    new Map(ranks.map((one) => [one.rank, one])),
    new Map(),
  );
}

describe("a map of ranks", () => {
  it("weighs blocks by their steps", () => {
    expect(map().value(SLOWNESS, 3)).toBeCloseTo((2 * 100 + 150) / 300);
    expect(map().value(SLOWNESS, 3, 1, 2)).toBe(1.5);
    expect(map().value(COMPUTE, 1)).toBe(20);
  });

  it("does not know a bandwidth without large calls", () => {
    expect(map().value(BANDWIDTH, 0)).toBeNull();
    expect(map().value(BANDWIDTH, 2)).toBe(3);
  });

  it("offers the dimensions in which ranks differ", () => {
    expect(map().dimensions()).toEqual(["rank", "dp", "pp", "host"]);
  });

  it("shows two dimensions", () => {
    const grid = map().grid(COMPUTE, "dp", "pp");
    expect([grid.rows, grid.columns]).toEqual([
      ["dp 0", "dp 1"],
      ["pp 0", "pp 1"],
    ]);
    expect(grid.cells.map((cell) => cell!.value)).toEqual([10, 30, 20, 40]);
  });

  it("shows the rank of a cell that stands out, over the steps", () => {
    const grid = map().grid(SLOWNESS, "host", "step");
    expect(grid.columns).toEqual(["steps 0–1", "step 2"]);
    expect(grid.cells.at(-1)).toEqual({ value: 1.5, rank: 3, ranks: 2, block: 1 });
    expect(map().grid(BANDWIDTH, "host", "pp").cells[0]).toMatchObject({ value: 6, rank: 1 });
  });

  it("leaves cells without ranks empty", () => {
    expect(map().grid(COMPUTE, "host", "pp").cells[1]).toBeNull();
  });
});

describe("a bounded grid", () => {
  it("joins neighbours and keeps the one that stands out", () => {
    const grid = bounded(map().grid(SLOWNESS, "rank", "step"), SLOWNESS, 2, 1);
    expect([grid.rows, grid.columns]).toEqual([["rank 0 to rank 1", "rank 2 to rank 3"], ["steps 0–1 to step 2"]]);
    expect(grid.cells[1]).toEqual({ value: 1.5, rank: 3, ranks: 4, block: 1 });
  });

  it("stays as it is where it is small enough", () => {
    const grid = map().grid(SLOWNESS, "rank", "step");
    expect(bounded(grid, SLOWNESS, 4, 2)).toBe(grid);
  });
});

describe("the colours", () => {
  const cells = (...values: number[]) => values.map((value) => ({ value, rank: 0, ranks: 1, block: 0 }));

  it("begin at what is typical", () => {
    expect(colourRange(cells(0.98, 1.3), SLOWNESS)).toEqual([1, 1.3]);
    expect(colourRange(cells(0.999, 1.001), SLOWNESS)).toEqual([1, 1.05]);
  });

  it("are not spent on a single cell far off", () => {
    const usual = Array.from({ length: 99 }, (_, index) => 100 + index);
    expect(colourRange(cells(...usual, 10_000), COMPUTE)).toEqual([100, 197]);
    expect(colourRange(cells(...usual, 250), COMPUTE)).toEqual([100, 250]);
  });

  it("make little of little differences", () => {
    expect(colourRange(cells(100, 101), COMPUTE)).toEqual([100, 105]);
  });
});

describe("what shows a finding", () => {
  const always = { cause: "compute", place: "ranks", occurrence: null, stretches: [] };
  const stretch = { first: 10, last: 14, since_ns: null, until_ns: null };

  it("is the quantity that its cause makes large or small", () => {
    expect(viewOfFinding(always)).toEqual({ quantity: "slowness", overSteps: false });
    expect(viewOfFinding({ ...always, cause: "data" }).quantity).toBe("pauses");
    expect(viewOfFinding({ ...always, cause: "communication" }).quantity).toBe("bandwidth");
    expect(viewOfFinding({ ...always, place: "link" }).quantity).toBe("bandwidth");
  });

  it("is over the steps, where it holds in some only", () => {
    expect(viewOfFinding({ ...always, stretches: [stretch] }).overSteps).toBe(true);
  });
});

it("pauses are what is left of a step", () => {
  const names = ["steps", "wall", "compute", "wait", "transfer", "bubble"];
  const columns = columnsOf(names, [{ steps: 2, wall: 100, compute: 50, wait: 20, transfer: 10, bubble: 5 }]);
  const map = new RankMap({ ranks: [7], blocks: [{ first: 1, last: 2 }] }, columns, new Map(), new Map());
  expect(map.value(QUANTITIES.find(({ name }) => name === "pauses")!, 7)).toBe(15);
});
