import { describe, expect, it } from "vitest";
import {
  formatBandwidth,
  formatBytes,
  formatClock,
  formatDuration,
  formatDurations,
  formatMilliseconds,
  formatPercent,
  formatRanks,
  niceTick,
} from "./format";

describe("numbers for people", () => {
  it("tells the ticks of an axis apart", () => {
    expect(formatDurations([165.8e6, 166e6, 166.2e6])).toEqual(["165.8 ms", "166.0 ms", "166.2 ms"]);
    expect(formatDurations([0, 5e8, 1e9])).toEqual(["0.0 s", "0.5 s", "1.0 s"]);
    expect(formatDurations([0, 20e6])).toEqual(["0 ms", "20 ms"]);
  });

  it("gives three digits and the unit", () => {
    expect([12, 1234, 1_234_567, 2e9, -1500].map(formatDuration)).toEqual([
      "12 ns",
      "1.23 µs",
      "1.23 ms",
      "2 s",
      "-1.5 µs",
    ]);
    expect([0, 999, 1000, 47244640256].map(formatBytes)).toEqual(["0 B", "999 B", "1 kB", "47.2 GB"]);
    expect([0.0005, 44.1, -2, null].map(formatBandwidth)).toEqual(["500 kB/s", "44.1 GB/s", "-2 GB/s", "–"]);
    expect(formatPercent(0.1234)).toBe("12.3 %");
    expect([formatPercent(-0.0001), formatMilliseconds(-1)]).toEqual(["0.0 %", "0.00"]);
  });

  it("reads long times off a clock", () => {
    expect([5e8, 61e9, 7.5e12].map(formatClock)).toEqual(["500 ms", "1:01", "2:05:00"]);
  });

  it("shows a dash for what is not known", () => {
    expect([formatDuration(null), formatBytes(-1), formatPercent(undefined)]).toEqual(["–", "–", "–"]);
  });

  it("shortens lists of ranks", () => {
    expect([[], [3], [0, 1], [0, 1, 2, 3, 8]].map(formatRanks)).toEqual(["", "3", "0, 1", "0–3, 8"]);
  });

  it("puts ticks at round times", () => {
    expect([0.5, 3, 12, 700].map(niceTick)).toEqual([1, 5, 20, 1000]);
  });
});
