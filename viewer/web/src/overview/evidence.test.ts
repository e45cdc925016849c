import { describe, expect, it } from "vitest";
import { holdsIn, isInTimeline, ranksKept, stepOf, viewOf } from "./evidence";

const STEPS = new Map([
  [1, 100],
  [2, 100],
  [3, 150],
  [4, 140],
]);
const usual = { occurrence: null, stretches: [], since_step: 2 };
const rare = { occurrence: { steps: [3, 4, 9], total_ns: 90, num_steps: 20 }, stretches: [], since_step: 3 };
const stretch = { first: 4, last: 8, since_ns: null, until_ns: null };

describe("the step that shows a finding", () => {
  it("is the one that is shown, if the finding holds in most steps", () => {
    expect(stepOf(usual, STEPS, 4)).toBe(4);
    expect(stepOf(usual, STEPS, 1)).toBe(2);
  });

  it("is the longest of those in which it holds, if these are few", () => {
    expect(stepOf(rare, STEPS, 1)).toBe(3);
    expect(stepOf({ occurrence: null, stretches: [stretch], since_step: 4 }, STEPS, 1)).toBe(4);
  });

  it("is not known where none of them is there", () => {
    expect(stepOf(rare, new Map([[1, 100]]), 1)).toBeNull();
  });
});

it("a finding without an end holds from its first step on", () => {
  expect([1, 2, 9].map((step) => holdsIn(usual, step))).toEqual([false, true, true]);
});

it("the numbers behind a finding are in the view of its kind, place and cause", () => {
  const slow = { kind: "slow", place: "ranks", cause: "compute" } as const;
  expect(viewOf(slow)).toBe("heat-map");
  expect(viewOf({ ...slow, cause: "communication" })).toBe("network");
  expect(viewOf({ ...slow, place: "stage" })).toBe("pipeline");
  expect(viewOf({ kind: "lost", place: "job", cause: "transfer" })).toBe("communication");
  expect(viewOf({ kind: "lost", place: "job", cause: "gc" })).toBe("time");
  expect(viewOf({ kind: "hang", place: "", cause: "" })).toBe("recording");
});

it("ranks and steps of what is slow are in the timeline, lost time is not", () => {
  const finding = { ...usual, kind: "slow" as const, ranks: [5] };
  expect(isInTimeline(finding)).toBe(true);
  expect(isInTimeline({ ...finding, ranks: [] })).toBe(false);
  expect(isInTimeline({ ...finding, kind: "lost" })).toBe(false);
});

it("the first few ranks of each finding keep their rows", () => {
  expect([...ranksKept([{ ranks: [7, 6, 5, 4, 3] }, { ranks: [1] }])]).toEqual([7, 6, 5, 4, 1]);
});
