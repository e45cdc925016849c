import { describe, expect, it } from "vitest";
import { type Boxes, columnsOf, outlineOf, rankOf, stepOf } from "../testing";
import { facts, headline } from "./facts";
import { search } from "./search";
import { type Box, Step } from "./step";

const RANKS = [rankOf(0, {}, "node0"), rankOf(1, {}, "node7")];
const BOXES: Boxes = {
  work: [
    { rank: 0, start: 0, duration: 30, kind: 1, name: 2, microbatch: 0, depth: 0 },
    { rank: 1, start: 0, duration: 60, kind: 1, name: 0, microbatch: 3, depth: 0 },
  ],
  stalls: [{ rank: 0, start: 35, duration: 40, state: 0, role: 0, communication: 0, depth: 0 }],
  communication: [
    {
      rank: 0,
      start: 35,
      duration: 40,
      name: 1,
      lane: 0,
      sublane: 0,
      bytes: 2048,
      seq: 5,
      wait: 30,
      transfer: 10,
      join: 9,
      timing: 0,
      start_exact: 1,
      end_exact: 1,
      transfer_exact: 1,
      finished: 1,
      is_async: 0,
    },
    {
      rank: 1,
      start: 65,
      duration: 10,
      name: 1,
      lane: 0,
      sublane: 0,
      bytes: 2048,
      seq: 5,
      wait: 0,
      transfer: 10,
      join: 9,
      timing: 0,
      start_exact: 1,
      end_exact: 1,
      transfer_exact: 1,
      finished: 1,
      is_async: 0,
    },
  ],
};
const STEP = stepOf(RANKS, BOXES);
const STALL: Box = { table: "stalls", rank: 0, row: 0 };

describe("a box", () => {
  it("leads from a stall to its communication and to everybody in it, the last to come last", () => {
    const communication = STEP.communicationOf(STALL)!;
    expect(communication).toEqual({ table: "communication", rank: 0, row: 0 });
    expect(STEP.participants(communication).map(({ rank }) => rank)).toEqual([0, 1]);
  });

  it("knows who came last as far as the clocks do", () => {
    const communication: Box = { table: "communication", rank: 0, row: 0 };
    const members = STEP.participants(communication);
    expect(STEP.lastToCome(members)?.rank).toBe(1);
    const withResidual = (p99: number | null) => {
      const residual_ns = p99 === null ? null : { p50: 0, p99, max: p99 };
      return stepOf(RANKS, BOXES, { ...outlineOf(RANKS), residual_ns }).lastToCome(members)?.rank ?? null;
    };
    expect([withResidual(30), withResidual(31), withResidual(null)]).toEqual([1, null, null]);
    expect(STEP.lastToCome(members.slice(0, 1))).toBeNull();
  });

  it("is described", () => {
    expect(headline(STEP, STALL)).toBe("wait for dp");
    expect(Object.fromEntries(facts(STEP, STALL))).toMatchObject({
      "waits for": "all_reduce · dp",
      bytes: "2.05 kB",
      wait: "30 ns",
      transfer: "10 ns",
      group: "0, 1 (seq 5)",
    });
  });

  it("below the error of the clocks has no length of its wait", () => {
    const short = stepOf([rankOf(0)], {
      communication: [
        {
          rank: 0,
          start: 0,
          duration: 5,
          name: 1,
          lane: 0,
          sublane: 0,
          bytes: 1,
          seq: 0,
          wait: 1,
          transfer: 4,
          join: -1,
          timing: 0,
          start_exact: 1,
          end_exact: 1,
          transfer_exact: 1,
          finished: 1,
          is_async: 0,
        },
      ],
    });
    expect(new Map(facts(short, { table: "communication", rank: 0, row: 0 })).get("wait")).toBe(
      "below the clock residual of 2 ns",
    );
  });

  it("says which of its times are bounds", () => {
    const late = stepOf(RANKS, {
      ...BOXES,
      communication: BOXES.communication!.map((row) => ({ ...row, wait: -1, start_exact: 0, transfer_exact: 0 })),
    });
    expect(Object.fromEntries(facts(late, { table: "communication", rank: 0, row: 0 }))).toMatchObject({
      duration: "at most 40 ns",
      from: "at the earliest 35 ns after the step began",
      wait: "not known: its start is a bound",
      transfer: "at most 10 ns",
      start: "a lower bound: launched behind another one in flight",
    });
    const hidden = stepOf(RANKS, {
      ...BOXES,
      communication: BOXES.communication!.map((row) => ({ ...row, end_exact: 0, transfer_exact: 0 })),
    });
    const found = Object.fromEntries(facts(hidden, { table: "communication", rank: 1, row: 0 }));
    expect(found).toMatchObject({ duration: "at most 10 ns", end: "an upper bound: nothing waited for it" });
    expect(found).not.toHaveProperty("start");
  });

  it("leaves the busy time of its rank", () => {
    expect([STEP.busy(0), STEP.busy(1)]).toEqual([60, 100]);
  });
});

describe("the search", () => {
  const found = (query: string) => search(STEP, query).map(({ rank, box }) => [rank, box?.row ?? null]);

  it("finds ranks by number and host", () => {
    expect([found("rank 1"), found("0"), found("node7")]).toEqual([[[1, null]], [[0, null]], [[1, null]]]);
  });

  it("finds microbatches and names", () => {
    expect([found("mb 3"), found("attention")]).toEqual([[[1, 0]], [[0, 0]]]);
  });

  it("finds nothing for nothing", () => {
    expect([found(" "), found("no such name")]).toEqual([[], []]);
  });
});

it("a step is as long as the mean of its ranks, not as what they span", () => {
  const bounds = columnsOf(
    ["rank", "start", "end", "own", "has_boxes"],
    [
      { rank: 0, start: 0, end: 80 },
      { rank: 1, start: 20, end: 120 },
    ],
  );
  const step = new Step("step/1", 1, 120, outlineOf([...RANKS, rankOf(2)]), bounds);
  expect([step.length, step.duration]).toEqual([90, 120]); // rank 2 does not have it
});
