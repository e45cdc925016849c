import { describe, expect, it } from "vitest";
import { type Change, type Comparison, verdict } from "./comparison";

const NO_CHANGE: Change = { before: 120, after: 120, difference: 0, relative: 0, noise: 2, is_real: false };

function compared(wall: Partial<Change>, mean: Partial<Change> = {}): Comparison {
  const change = { before: 100, after: 110, difference: 10, relative: 0.1, noise: 2, is_real: true, ...wall };
  return {
    run_before: "old",
    run_after: "new",
    steps: { before: 9, after: 9 },
    wall_ns: change,
    mean_ns: { ...NO_CHANGE, ...mean },
    parts_ns: [],
    busbw_gbps: [],
    circumstances: [],
  };
}

describe("the verdict on two runs", () => {
  it("says which one takes longer", () => {
    expect(verdict(compared({}))).toBe("A step of new takes 10.0 % longer than one of old.");
    expect(verdict(compared({ relative: -0.2 }))).toBe("A step of new takes 20.0 % less than one of old.");
  });

  it("says it of the mean step where that changed more: slow steps that are few do not move the median", () => {
    expect(verdict(compared({ is_real: false }, { relative: 0.37, is_real: true }))).toBe(
      "The mean step of new takes 37.0 % longer than one of old.",
    );
    expect(verdict(compared({}, { relative: 0.05, is_real: true }))).toContain("10.0 % longer");
  });

  it("makes nothing of noise, and abstains from too few steps", () => {
    expect(verdict(compared({ is_real: false }))).toContain("within the noise");
    expect(verdict(compared({ noise: null }))).toContain("too few steps");
  });
});
