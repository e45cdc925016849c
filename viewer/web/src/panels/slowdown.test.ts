import { describe, expect, it } from "vitest";
import { type Slowdown, sentence, slices } from "./slowdown";

const SLOWDOWN: Slowdown = {
  S: 1.25,
  S_by_step: { 3: 1.2, 4: 1.3 },
  S_by_operation: { forward: 1.2, all_reduce: 1.01 },
  S_by_stage: { 0: 1, 1: 1.2 },
  S_by_dp_rank: { 0: 1.2 },
  S_by_worker: { 0: 1, 1: 1.19 },
  slowest_workers: [4, 5, 6],
  M_W: 0.8,
  M_S: null,
};

describe("the replay", () => {
  it("names the largest part first", () => {
    expect(slices(SLOWDOWN, "stage")).toEqual([
      { name: "1", slowdown: 1.2 },
      { name: "0", slowdown: 1 },
    ]);
  });

  it("says what the slowest ranks cost, and nothing of what is not known", () => {
    const text = sentence(SLOWDOWN);
    expect(text).toContain("a step takes 25.0 % longer");
    expect(text).toContain("With the slowest ranks (4–6) as fast as ideal, 80.0 % of that would be gone.");
    expect(text).not.toContain("last stage");
  });
});
