import { describe, expect, it } from "vitest";
import { columnsOf } from "../testing";
import {
  ALL,
  besideSimilar,
  type GroupCall,
  type Groups,
  MESSAGES,
  matrix,
  partsOfNodes,
  partsOfRanks,
  trafficKinds,
} from "./matrix";

const call = (group: number, operation: string, busBytes: number, gbps: number | null): GroupCall => ({
  group,
  operation,
  count: 1,
  bytes: busBytes,
  bus_bytes: busBytes,
  busbw_gbps: gbps,
  bandwidth_time: "transfer",
  bandwidth_is_bound: false,
  large_calls: gbps === null ? 0 : 1,
  quantiles_gbps: gbps === null ? null : [gbps, gbps, gbps, gbps, gbps],
  exposed_ns: 0,
  wait_ns: 0,
});

const group = (role: string, ...ranks: number[]) => ({ role, ranks, inter_node: null, compared: 0, last: [] });

// Two nodes of two ranks: tp within a node, dp over all, a message from rank 0 to rank 2.
const GROUPS: Groups = {
  groups: [group("tp", 0, 1), group("tp", 2, 3), group("dp", 0, 1, 2, 3), group("pp", 0, 2)],
  calls: [
    call(0, "all_reduce", 200, 90),
    call(1, "all_reduce", 200, 80),
    call(2, "all_reduce", 1200, 20),
    call(3, "send", 0, null),
    call(3, "recv", 5000, 40),
  ],
};
const MESSAGE = columnsOf(
  ["sender", "receiver", "calls", "bytes", "large_bytes", "large_ns"],
  [{ sender: 0, receiver: 2, calls: 5, bytes: 5000, large_bytes: 4000, large_ns: 100 }],
);
const RANKS = [0, 1, 2, 3].map((rank) => ({ rank, host: rank < 2 ? "n2" : "n10" }));
const NODES = partsOfNodes(RANKS);

describe("a matrix of the network", () => {
  it("has nodes in the order of their numbers", () => {
    expect(NODES).toEqual([
      { name: "n2", ranks: [0, 1], host: "n2" },
      { name: "n10", ranks: [2, 3], host: "n10" },
    ]);
  });

  it("spreads a collective evenly over the pairs of its group", () => {
    const bytes = (kind: string) => matrix(NODES, GROUPS, MESSAGE, kind).map((flow) => flow?.bytes ?? null);
    expect(bytes("all_reduce of dp")).toEqual([200, 400, 400, 200]);
    expect(bytes("all_reduce of tp")).toEqual([200, null, null, 200]);
    expect(bytes(MESSAGES)).toEqual([null, 5000, null, null]);
    expect(bytes(ALL)).toEqual([400, 5400, 400, 400]);
  });

  it("prefers what passes through a link alone", () => {
    const flows = matrix(NODES, GROUPS, MESSAGE, ALL);
    expect(flows[0]).toMatchObject({ gbps: 90, of: "all_reduce of tp, 2 ranks", isOwn: true });
    expect(flows[1]).toMatchObject({ gbps: 20, of: "all_reduce of dp, 4 ranks", isOwn: true });
    const ranks = matrix(partsOfRanks(RANKS, 4), GROUPS, MESSAGE, ALL);
    expect(ranks[2]).toMatchObject({ gbps: 40, of: MESSAGES, isOwn: true });
    expect(ranks[3]).toMatchObject({ gbps: 20, of: "all_reduce of dp, 4 ranks", isOwn: false });
  });

  it("compares a bandwidth with those of the same traffic within nodes, or between them", () => {
    const flows = matrix(NODES, GROUPS, MESSAGE, ALL);
    expect(besideSimilar(NODES, flows)).toEqual([90 / 85, 1, 1, 80 / 85]);
  });

  it("offers the traffic with most bytes first", () => {
    expect(trafficKinds(GROUPS, MESSAGE)).toEqual([ALL, MESSAGES, "all_reduce of dp", "all_reduce of tp"]);
  });

  it("puts neighbours together where ranks are many", () => {
    expect(partsOfRanks([...RANKS, { rank: 4, host: "n10" }], 2)).toEqual([
      { name: "ranks 0–2", ranks: [0, 1, 2], host: null },
      { name: "ranks 3–4", ranks: [3, 4], host: "n10" },
    ]);
  });
});
