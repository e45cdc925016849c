import { describe, expect, it } from "vitest";
import { logTicks } from "../chart";
import type { Overview, OverviewTerms } from "../data/overview";
import type { Communication, Finding, RankTimes, Summary } from "../data/types";
import { type Bar, barsOfRanks, sorted } from "../panels/breakdown";
import { columnsOf } from "../testing";
import { bestSeen, binsOf } from "./bandwidth";
import { blocksOf } from "./blocks";
import { exposedRoles } from "./exposed";

const TERMS = {
  states: [
    { kind: "compute", detail: "forward" },
    { kind: "compute", detail: "backward" },
    { kind: "exposed wait", detail: "dp" },
    { kind: "exposed transfer", detail: "dp" },
  ],
  roles: ["dp", "tp"],
  operations: ["all_reduce"],
} as unknown as OverviewTerms;

function rank(number: number, stage: number, compute: number, wait = 0): RankTimes {
  const none = {
    idle_ns: 0,
    replay_ns: 0,
    data_ns: 0,
    checkpoint_ns: 0,
    gc_ns: 0,
    between_ns: 0,
    other_ns: 0,
    exposed_memory_ns: 0,
    bubble_ns: 0,
  };
  const exposed = { exposed_ns: { dp: { wait, transfer: 10 } }, exposed_total_ns: wait + 10 };
  const counts = { hidden_ns: 4, wait_ns: 0, blame_ns: 0, launch_bound_ns: { forward: number, backward: 1 } };
  const place = { rank: number, host: "a", coordinates: { pp: stage } };
  return { ...place, ...none, ...exposed, ...counts, compute_ns: compute, wall_ns: compute + wait + 10 };
}

const RUN = { steps: { count: 2, left_out: [] }, parallel: { pp: 2 } } as unknown as Summary["run"];

describe("blocks of steps", () => {
  it("are means per rank and step", () => {
    const names = ["first", "last", "rank_steps", "state", "ns"];
    const rows = [
      { first: 0, last: 1, rank_steps: 4, state: 0, ns: 40 },
      { first: 0, last: 1, rank_steps: 4, state: 1, ns: 80 },
      { first: 0, last: 1, rank_steps: 4, state: 3, ns: 8 },
      { first: 2, last: 2, rank_steps: 2, state: 2, ns: 6 },
    ];
    const [whole, last] = blocksOf({ terms: TERMS, blocks: columnsOf(names, rows) } as unknown as Overview);
    expect([whole!.first, whole!.last, whole!.times.compute_ns, whole!.times.wall_ns]).toEqual([0, 1, 30, 32]);
    expect(whole!.times.exposed_ns).toEqual({ dp: { wait: 0, transfer: 2 } });
    expect(last!.times.exposed_ns).toEqual({ dp: { wait: 3, transfer: 0 } });
  });
});

describe("bars", () => {
  const ranks = [rank(0, 0, 100), rank(1, 0, 120, 5), rank(2, 1, 80, 25)];
  const leads = { rank: () => undefined, step: () => null, stall: () => undefined, find: () => undefined };
  const labels = (bars: readonly Bar[]) => bars.map(({ label }) => label);
  const theme = { role: (role: string) => role };

  it("are of ranks, or means of their groups", () => {
    expect(barsOfRanks({ ranks, run: RUN, findings: [] }, "rank", leads)).toHaveLength(3);
    const findings = [{ ranks: [1] }] as Finding[];
    const named = barsOfRanks({ ranks, run: RUN, findings }, "rank", leads);
    expect(named.map(({ isNamed }) => isNamed)).toEqual([false, true, false]);
    const stages = barsOfRanks({ ranks, run: RUN, findings: [] }, "stage", leads);
    expect(stages.map(({ launch_bound_ns }) => launch_bound_ns)).toEqual([1.5, 3]);
    const unknown = ranks.map((one) => ({ ...one, launch_bound_ns: null }));
    expect(barsOfRanks({ ranks: unknown, run: RUN, findings: [] }, "stage", leads)[0]!.launch_bound_ns).toBeNull();
    expect(labels(stages)).toEqual(["stage 0 · mean of 2", "stage 1 · mean of 1"]);
    expect(stages[0]!.times.compute_ns).toBe(110);
    expect(stages[0]!.times.exposed_ns).toEqual({ dp: { wait: 2.5, transfer: 10 } });
  });

  it("are sorted by any of their parts", () => {
    const bars = barsOfRanks({ ranks, run: RUN, findings: [] }, "rank", leads);
    const waits = (by: string) => sorted(bars, by, ["dp"], theme).map(({ times }) => times.exposed_ns.dp!.wait);
    expect(waits("dp wait")).toEqual([25, 5, 0]);
    expect(waits("whole")).toEqual([5, 25, 0]);
    expect(waits("name")).toEqual([0, 5, 25]);
  });
});

describe("exposed communication", () => {
  it("says what its transfers take of the critical path", () => {
    const summary = {
      run: RUN,
      ranks: [rank(0, 0, 100, 20), rank(1, 1, 120)],
      communication: [{ role: "dp", hidden_ns: 16 } as Communication, { role: "tp", hidden_ns: 8 } as Communication],
      critical_path: {
        steps: 2,
        ns: 280,
        uncertain_ns: 0,
        shares: [
          { rank: 0, kind: "transfer", role: "dp", ns: 12 },
          { rank: 1, kind: "transfer", role: "dp", ns: 2 },
          { rank: 0, kind: "forward", role: "", ns: 200 },
        ],
      },
    };
    expect(exposedRoles(summary)).toEqual([
      { role: "dp", wait: 10, transfer: 10, hidden: 4, saved: 7 },
      { role: "tp", wait: 0, transfer: 0, hidden: 2, saved: 0 },
    ]);
    expect(exposedRoles({ ...summary, critical_path: null })[0]!.saved).toBeNull();
  });
});

describe("bandwidth", () => {
  const names = [
    "role",
    "operation",
    "group_size",
    "reach",
    "is_matched",
    "is_bound",
    "calls",
    "bytes",
    "median",
    "best",
  ];
  const row = { operation: 0, group_size: 2, reach: 1, is_matched: 1, is_bound: 0, calls: 1 };
  const bins = binsOf({
    terms: TERMS,
    bandwidth: columnsOf(names, [
      { ...row, role: 0, bytes: 1024, median: 5, best: 9 },
      { ...row, role: 1, bytes: 1500, median: 7, best: 8 },
      { ...row, role: 1, bytes: 4096, median: 20, best: 30 },
      { ...row, role: 1, bytes: 4096, median: 20, best: 90, is_matched: 0 },
      { ...row, role: 1, bytes: 4096, median: 20, best: 95, is_bound: 1 },
      { ...row, role: 1, bytes: 4096, median: 2, best: 3, reach: 2 },
    ]),
  });

  it("of the best is that of matched calls with exact times, of any role, within and between nodes apart", () => {
    expect(bestSeen(bins, "within")).toEqual([
      { bytes: 1024, best: 9 },
      { bytes: 4096, best: 30 },
    ]);
    expect(bestSeen(bins, "between")).toEqual([{ bytes: 4096, best: 3 }]);
  });

  it("has ticks at powers of ten, and between them where there are few", () => {
    expect(logTicks(3, 2e5)).toEqual([10, 100, 1000, 10_000, 100_000]);
    expect(logTicks(3, 60)).toEqual([5, 10, 20, 50]);
  });
});
