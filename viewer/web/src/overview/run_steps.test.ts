import { describe, expect, it } from "vitest";
import type { OverviewTerms } from "../data/overview";
import { columnsOf, type Row } from "../testing";
import { RunSteps } from "./run_steps";

const TERMS: OverviewTerms = {
  begin_utc: null,
  median_ns: 10,
  reasons: ["warm-up", "done again later", "of an earlier launch"],
  events: ["evaluation", "checkpoint", "restart"],
  states: [],
  roles: [],
  operations: [],
  uncertain_calls: 0,
};

function runOf(steps: Row[], events: Row[] = []): RunSteps {
  const names = ["step", "launch", "start", "duration", "reason", "is_outlier"];
  const none = columnsOf([], []);
  return new RunSteps({
    terms: TERMS,
    steps: columnsOf(names, steps),
    events: columnsOf(["kind", "start", "duration"], events),
    blocks: none,
    bandwidth: none,
  });
}

// Step 1 was lost when the job was started again.
const RESTARTED = runOf(
  [
    { step: 0, launch: 0, start: 0, duration: 10, reason: 0 },
    { step: 1, launch: 0, start: 10, duration: 10, reason: 1 },
    { step: 1, launch: 1, start: 50, duration: 12 },
    { step: 2, launch: 1, start: 62, duration: 30, is_outlier: 1 },
    { step: 3, launch: 1, start: 100, duration: 40, is_outlier: 1 },
  ],
  [
    { kind: 2, start: 20, duration: 30 },
    { kind: 1, start: 97, duration: 2 },
  ],
);

describe("steps of a run", () => {
  it("knows why a step does not count, and which are on the line", () => {
    expect([0, 1, 2].map((row) => RESTARTED.leftOut(row))).toEqual(["warm-up", "done again later", ""]);
    expect([0, 1, 2, 3].map((row) => RESTARTED.isUsual(row))).toEqual([false, false, true, true]);
  });

  it("puts the attempts of a step one after the other", () => {
    expect(RESTARTED.order("step")).toEqual([0, 1, 2, 3, 4]);
    expect(RESTARTED.order("step").map((row) => RESTARTED.at(row, "step"))).toEqual([0, 1, 1, 2, 3]);
  });

  it("names the longest outlier first", () => {
    expect(RESTARTED.outliers()).toEqual([4, 3]);
  });

  it("places a restart at its first step, and a checkpoint where it was among the steps", () => {
    const [restart, checkpoint] = RESTARTED.events;
    expect(RESTARTED.placeOf(restart!, "step")).toBe(1);
    expect(RESTARTED.placeOf(checkpoint!, "step")).toBeCloseTo(2 + 35 / 38);
    expect(RESTARTED.placeOf(checkpoint!, "time")).toBe(97);
  });

  it("takes 100,000 steps", () => {
    const many = runOf(
      Array.from({ length: 100_000 }, (_, step) => ({ step, start: step * 10, duration: 10, is_outlier: 0 })),
    );
    expect(many.order("step")).toHaveLength(100_000);
    expect(many.outliers()).toEqual([]);
  });
});
