import { describe, expect, it } from "vitest";
import { rankOf, stepOf } from "../testing";
import { busyShare } from "./minimap";
import { partition } from "./partition";

const STEP = stepOf([rankOf(0), rankOf(1)], {
  work: [
    { rank: 0, start: 10, duration: 50, kind: 1, depth: 0, name: 0, microbatch: 0 },
    { rank: 0, start: 20, duration: 10, kind: 3, depth: 1, name: 0, microbatch: 0 },
    { rank: 1, start: 0, duration: 100, kind: 2, depth: 0, name: 0, microbatch: 0 },
  ],
  stalls: [
    { rank: 0, start: 40, duration: 15, state: 0, role: 0, depth: 1 },
    { rank: 0, start: 70, duration: 20, state: 2, role: 1, depth: 0 },
  ],
});

function parts(from: number, to: number, ranks: number[]): Record<string, number> {
  return Object.fromEntries(partition(STEP, { from, to }, ranks).map(({ name, ns }) => [name, ns]));
}

describe("the partition of a range", () => {
  it("gives every instant to one part", () => {
    const whole = parts(0, 100, [0]);
    expect(whole).toEqual({ forward: 25, optimizer: 10, "wait for dp": 15, "pipeline bubble": 20, "in no span": 30 });
    expect(Object.values(whole).reduce((sum, ns) => sum + ns)).toBe(100);
  });

  it("cuts what reaches beyond the range", () => {
    expect(parts(45, 75, [0])).toEqual({ "wait for dp": 10, forward: 5, "in no span": 10, "pipeline bubble": 5 });
  });

  it("shows pauses where nothing else is", () => {
    const waiting = stepOf([rankOf(0)], {
      work: [{ rank: 0, start: 30, duration: 50, kind: 1, depth: 0, name: 0, microbatch: 0 }],
      host: [{ rank: 0, start: 0, duration: 40, kind: 4, name: 0 }],
    });
    const shares = partition(waiting, { from: 0, to: 100 }, [0]);
    expect(Object.fromEntries(shares.map(({ name, ns }) => [name, ns]))).toEqual({
      forward: 50,
      data: 30,
      "in no span": 20,
    });
  });

  it("adds up ranks", () => {
    expect(parts(0, 10, [0, 1])).toEqual({ "in no span": 10, backward: 10 });
  });
});

it("the small picture shows where ranks are busy", () => {
  const shares = busyShare(STEP, [0]);
  const at = (time: number) => shares[Math.floor((time / 100) * shares.length)];
  expect([at(5), at(15), at(45), at(57), at(80)].map((share) => Math.round(share! * 1000) / 1000)).toEqual([
    0, 1, 0, 1, 0,
  ]);
});
