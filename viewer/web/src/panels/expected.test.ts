import { describe, expect, it } from "vitest";
import { bubbleText } from "./expected";

const PIPELINE = { schedule: "1F1B", stages: 4, chunks: 1, microbatches: 8 };

describe("the bubble beside its plan", () => {
  it("has both shares of the same time", () => {
    const pipeline = { ...PIPELINE, fraction_of_phase: { idle: 0.3, theoretical_bubble: 0.2727 } };
    expect(bubbleText(3 / 11, pipeline)).toBe(
      "Ideal: 27.3 % of the time from the first forward to the last backward; the run was idle for 30.0 % of it.",
    );
  });

  it("makes no number of what was not measured", () => {
    expect(bubbleText(3 / 11, PIPELINE)).toContain("is not known");
    expect(bubbleText(3 / 11, null)).toContain("is not known");
  });
});
