import { beforeEach, describe, expect, it } from "vitest";
import type { Communication, Summary } from "../data/types";
import { showCommunication } from "./communication";

const ROW: Communication = {
  role: "dp",
  operation: "all_reduce",
  group_size: 4,
  inter_node: false,
  count: 40,
  bytes: 4000,
  duration_ns: { p50: 1000, p99: 2000, max: 3000 },
  durations_are_bounds: false,
  algbw_gbps: 2,
  busbw_gbps: 3,
  bandwidth_time: "transfer",
  bandwidth_is_bound: false,
  exposed_ns: 0,
  hidden_ns: 0,
  wait_ns: 0,
  unfinished: 0,
  replayed: 0,
  upper_bounds: 0,
};

function shown(row: Partial<Communication>): string {
  showCommunication({ communication: [{ ...ROW, ...row }] } as Summary);
  return document.getElementById("communication")!.textContent!;
}

describe("the table of communication", () => {
  beforeEach(() => {
    document.body.innerHTML = '<section id="communication"></section>';
  });

  it("marks durations that are upper bounds, also where some calls are exact", () => {
    const text = shown({ upper_bounds: 38, durations_are_bounds: true });
    expect(text).toContain("≤1 µs");
    expect(text).toContain("of all, as the exact ones hold less than half of the bytes");
  });

  it("marks none where the exact calls stand for all", () => {
    const text = shown({ upper_bounds: 2 });
    expect(text).not.toContain("≤1 µs");
    expect(text).toContain("Start or end of 2 calls is only a bound.");
  });
});
