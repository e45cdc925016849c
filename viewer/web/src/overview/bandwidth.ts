// Bins of calls by message size, and the curve of the best bandwidth seen.

import type { Overview } from "../data/overview";

export type Reach = "within" | "between" | "unknown";

export interface Bin {
  role: string;
  operation: string;
  groupSize: number;
  reach: Reach;
  isMatched: boolean; // else the times include waits
  isBound: boolean; // the bandwidths are lower bounds
  calls: number;
  bytes: number; // mean of a call
  median: number; // bus bandwidth, bytes per second
  best: number;
}

const REACHES: Record<number, Reach> = { 1: "within", 2: "between" };

export function binsOf({ bandwidth, terms }: Pick<Overview, "bandwidth" | "terms">): Bin[] {
  const of = (name: string) => bandwidth.of(name);
  const [role, operation, size, reach] = [of("role"), of("operation"), of("group_size"), of("reach")];
  const bound = of("is_bound");
  const [matched, calls, bytes, median, best] = [of("is_matched"), of("calls"), of("bytes"), of("median"), of("best")];
  return Array.from({ length: bandwidth.length }, (_, row) => ({
    role: terms.roles[role[row]!] ?? "",
    operation: terms.operations[operation[row]!] ?? "",
    groupSize: size[row]!,
    reach: REACHES[reach[row]!] ?? "unknown",
    isMatched: matched[row] === 1,
    isBound: bound[row] === 1,
    calls: calls[row]!,
    bytes: bytes[row]!,
    median: median[row]!,
    best: best[row]!,
  }));
}

/** The best of all matched calls with exact times of each power of two of bytes, within or between nodes; ascending by bytes. */
export function bestSeen(bins: readonly Bin[], reach: Reach): { bytes: number; best: number }[] {
  const found = new Map<number, { bytes: number; best: number }>();
  for (const bin of bins) {
    if (bin.reach !== reach || !bin.isMatched || bin.isBound) continue;
    const size = Math.floor(Math.log2(bin.bytes));
    if (bin.best > (found.get(size)?.best ?? 0)) found.set(size, { bytes: bin.bytes, best: bin.best });
  }
  return [...found.values()].sort((a, b) => a.bytes - b.bytes);
}
