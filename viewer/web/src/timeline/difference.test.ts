import { describe, expect, it } from "vitest";
import { columnsOf, type Row } from "../testing";
import { difference, partName } from "./difference";

const STATES = ["rank", "compute/forward", "exposed wait/dp", "exposed transfer/dp", "bubble/", "data/"];

function step(rows: Row[]) {
  return columnsOf(
    STATES,
    rows.map((row, rank) => ({ rank, ...Object.fromEntries(STATES.slice(1).map((name) => [name, 0])), ...row })),
  );
}

const TYPICAL = step([{ "compute/forward": 100 }, { "compute/forward": 100 }, { "compute/forward": 100 }]);

describe("the difference of two steps", () => {
  it("names the rank that works for longer, not those that wait for it", () => {
    const slow = step([
      { "compute/forward": 100, "exposed wait/dp": 50 },
      { "compute/forward": 120, "data/": 30 },
      { "compute/forward": 100, "bubble/": 50 },
    ]);
    const { leaders, parts } = difference(slow, TYPICAL);
    expect(leaders).toEqual([{ rank: 1, more: 50, part: "data", partMore: 30 }]);
    expect(parts.slice(0, 2).map(({ name }) => name)).toEqual(["dp wait", "pipeline bubble"]);
    expect(parts.find(({ name }) => name === "forward")).toEqual({ name: "forward", ns: 320 / 3, before: 100 });
  });

  it("names nobody where all ranks are alike", () => {
    const slow = step([0, 1, 2].map(() => ({ "compute/forward": 150 })));
    expect(difference(slow, TYPICAL).leaders).toEqual([]);
    expect(difference(slow, TYPICAL).ranks.map(({ more }) => more)).toEqual([50, 50, 50]);
  });

  it("names nobody where the step is shorter", () => {
    expect(difference(TYPICAL, step([0, 1, 2].map(() => ({ "compute/forward": 150 })))).leaders).toEqual([]);
  });

  it("takes a state that only one of the steps has as none in the other", () => {
    const plain = columnsOf(["rank", "compute/forward"], [{ rank: 0, "compute/forward": 100 }]);
    const saving = columnsOf(
      ["rank", "compute/forward", "checkpoint/"],
      [{ rank: 0, "compute/forward": 100, "checkpoint/": 9 }],
    );
    expect(difference(saving, plain).parts[0]).toEqual({ name: "checkpoint", ns: 9, before: 0 });
    expect(difference(plain, saving).ranks).toEqual([{ rank: 0, more: -9, part: "forward", partMore: 0 }]);
  });
});

it("parts have the names of the breakdown", () => {
  expect(["exposed transfer/tp", "compute/backward", "compute/other", "gc/", "other/"].map(partName)).toEqual([
    "tp transfer",
    "backward",
    "other compute",
    "gc",
    "in no span",
  ]);
});
