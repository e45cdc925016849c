import { describe, expect, it } from "vitest";
import { columnsOf, outlineOf, rankOf } from "../testing";
import { CriticalPath } from "./critical_path";

const NAMES = ["rank", "start", "duration", "kind", "role", "uncertain"];
const KINDS = ["forward", "transfer", "host"];
const PATH = new CriticalPath(
  columnsOf(NAMES, [
    { rank: 0, start: 0, duration: 40, kind: 0, uncertain: 0 },
    { rank: 1, start: 40, duration: 10, kind: 1, role: 1, uncertain: 1 },
    { rank: 1, start: 50, duration: 5, kind: 0, uncertain: 0 },
    { rank: 0, start: 55, duration: 7, kind: 1, role: 1, uncertain: 0 },
    { rank: 0, start: 62, duration: 8, kind: 0, uncertain: 0 },
  ]),
  KINDS,
  outlineOf([rankOf(0), rankOf(1)]),
);

describe("critical path", () => {
  it("adds up to the length of the step", () => {
    expect(PATH.length).toBe(70);
    expect(PATH.shares().reduce((sum, { ns }) => sum + ns, 0)).toBe(70);
  });

  it("is summed by rank and kind, transfers by role", () => {
    expect(PATH.shares().map(({ rank, kind, role, ns, uncertain }) => [rank, kind, role, ns, uncertain])).toEqual([
      [0, "forward", "", 48, 0],
      [-1, "transfer", "pp", 17, 10],
      [1, "forward", "", 5, 0],
    ]);
  });

  it("leads to the longest piece of a share", () => {
    expect(PATH.shares().map(({ longest }) => longest.start)).toEqual([0, 40, 50]);
  });
});
