import { describe, expect, it } from "vitest";
import type { Finding, RankTimes, Summary } from "../data/types";
import { figures } from "./figures";
import { judgement } from "./state";

const RANKS = [{ wall_ns: 200e6, exposed_total_ns: 50e6, bubble_ns: 20e6 } as RankTimes];

function summaryOf(kinds: Finding["kind"][], steps = 10) {
  return {
    findings: kinds.map((kind) => ({ kind }) as Finding),
    run: { steps: { count: steps } } as Summary["run"],
    ranks: RANKS,
    together_ns: 30e6,
    lost_time: null as Summary["lost_time"],
    pipeline: null,
  };
}

describe("the state of a job in one line", () => {
  it("says first that it stopped, then that its steps are slow, and what that costs", () => {
    expect(judgement(summaryOf(["hang", "slow"])).level).toBe("bad");
    expect(judgement(summaryOf(["slow", "lost"])).words).toBe("One fault slows the steps by 30 ms (15.0 %)");
    expect(judgement(summaryOf(["slow", "slow"])).words).toBe("2 faults slow the steps by 30 ms (15.0 %)");
  });

  it("does not say that all is well where it could not be judged", () => {
    expect(judgement(summaryOf(["lost"])).level).toBe("good");
    expect(judgement(summaryOf(["lost", "not_judged"])).level).toBe("unknown");
    expect(judgement(summaryOf([], 0)).level).toBe("unknown");
  });
});

describe("key figures", () => {
  const named = (summary: ReturnType<typeof summaryOf>, used: Parameters<typeof figures>[2] = null) =>
    Object.fromEntries(figures(summary, 190e6, used).map(({ name, value }) => [name, value]));

  it("are the parts of the mean step; there is no bubble without a pipeline", () => {
    expect(named(summaryOf(["slow"]))).toEqual({
      Step: "200 ms",
      "Exposed communication": "25.0 %",
      "Slow ranks and links": "15.0 %",
    });
    const pipeline = { stages: 4 } as Summary["pipeline"];
    expect(figures({ ...summaryOf([]), pipeline }, null, null).map(({ name }) => name)).toContain("Bubble");
  });

  it("say what the step loses to it, as the findings do, besides what ranks spend in it", () => {
    const lost = { gpus: null, steps_ns: 400e6, ideal_ns: 300e6, exposed_communication_ns: 60e6 };
    const exposed = figures({ ...summaryOf([]), lost_time: lost }, null, null).find(
      ({ view }) => view === "communication",
    );
    expect(exposed?.detail).toBe("50 ms a step; costs 30 ms");
  });

  it("have lost GPU-hours where the job has GPUs, and the MFU where it is known", () => {
    const lost = { gpus: 64, steps_ns: 3600e9, ideal_ns: 2700e9 };
    expect(named({ ...summaryOf([]), lost_time: lost })["Lost GPU-hours"]).toBe("16");
    expect(named({ ...summaryOf([]), lost_time: { ...lost, gpus: null } })["Lost time"]).toBe("25.0 %");
    expect(named(summaryOf([]), { mfu: 0.41, flops_per_second: 4e14 }).MFU).toBe("41.0 %");
  });

  it("do not call a job even that was not judged", () => {
    expect(named(summaryOf(["not_judged"]))["Slow ranks and links"]).toBe("not judged");
    expect(named(summaryOf([]))["Slow ranks and links"]).toBe("none");
  });
});
