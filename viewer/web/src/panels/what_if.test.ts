import { describe, expect, it } from "vitest";
import type { Communication } from "../data/types";
import { type Answer, command, rolesOf, sentences } from "./what_if";

const ANSWER: Answer = {
  changes: ["dp bandwidth × 2"],
  fidelity: { measured_ns: 100e6, replayed_ns: 99e6, error: -0.01, is_faithful: true },
  predicted_ns: 80e6,
  uncertainty_ns: 1.5e6,
  throughput_ratio: 1.25,
  assumptions: ["No latency."],
  microbatches: null,
  recorded_microbatches: null,
  drawn: "whatif/1",
};

describe("a prediction", () => {
  it("begins with how well the run itself is reproduced", () => {
    expect(sentences(ANSWER)).toEqual([
      "The replay of the run itself misses its step of 100.00 ms by 1.0 %.",
      "With dp bandwidth × 2, a step would take 80.00 ± 1.50 ms: 20.0 % less.",
      "Assumed: No latency.",
    ]);
  });

  it("warns where it is not, and counts microbatches", () => {
    const fidelity = { ...ANSWER.fidelity, error: 0.05, is_faithful: false };
    const [first, second] = sentences({ ...ANSWER, fidelity, microbatches: 8, recorded_microbatches: 4 });
    expect(first).toContain("as a direction");
    expect(second).toContain("8 microbatches instead of 4: 1.250 times as many per second.");
  });

  it("is of nothing without changes", () => {
    expect(sentences({ ...ANSWER, changes: [] })[1]).toBe("Nothing was changed.");
  });

  it("has the role first that is waited for most, and a command for a report", () => {
    const row = (role: string, group_size: number, exposed_ns: number) =>
      ({ role, group_size, exposed_ns }) as Communication;
    const roles = rolesOf({ communication: [row("tp", 1, 9), row("pp", 2, 3), row("dp", 4, 2), row("dp", 4, 2)] });
    expect(roles).toEqual(["dp", "pp"]);
    expect(command(roles[0])).toBe("commtrace whatif RUN --bandwidth dp=2x -o whatif.html");
    expect(command(undefined)).toContain("--without-slow-rank all");
  });
});
