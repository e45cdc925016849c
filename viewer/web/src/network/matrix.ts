// Bytes and bandwidth between nodes, or between ranks: a matrix of parts, each some ranks.

import type { Columns } from "../data/columns";

/** The resource `groups.json`. */
export interface GroupCall {
  group: number;
  operation: string;
  count: number;
  bytes: number | null;
  bus_bytes: number;
  busbw_gbps: number | null;
  bandwidth_time: string | null;
  bandwidth_is_bound: boolean;
  large_calls: number;
  quantiles_gbps: [p1: number, p25: number, p50: number, p75: number, p99: number] | null;
  exposed_ns: number;
  wait_ns: number | null;
}

export interface Group {
  role: string;
  ranks: number[];
  inter_node: boolean | null;
  compared: number;
  last: { rank: number; times: number; wait_ns: number }[];
}

export interface Groups {
  groups: Group[];
  calls: GroupCall[];
}

/** Ranks that are one row, and one column, of a matrix. */
export interface Part {
  name: string;
  ranks: number[];
  host: string | null; // of all its ranks; null if they are on several
}

export interface Flow {
  bytes: number;
  gbps: number | null;
  /** What `gbps` was measured on, and whether nothing but this cell takes part in it. */
  of: string;
  isOwn: boolean;
}

export const ALL = "all traffic";
export const MESSAGES = "messages";

const isMessage = (call: GroupCall) => call.operation === "send" || call.operation === "recv";

/** The kinds of traffic of a run, those with most bytes first. */
export function trafficKinds(groups: Groups, messages: Columns): string[] {
  const bytes = new Map<string, number>();
  if (messages.length)
    bytes.set(
      MESSAGES,
      Float64Array.from(messages.of("bytes")).reduce((sum, one) => sum + one, 0),
    );
  for (const call of groups.calls) {
    if (isMessage(call)) continue;
    const kind = kindOf(groups, call);
    bytes.set(kind, (bytes.get(kind) ?? 0) + call.bus_bytes);
  }
  return [ALL, ...[...bytes].sort(([, a], [, b]) => b - a).map(([kind]) => kind)];
}

function kindOf(groups: Groups, call: GroupCall): string {
  return `${call.operation} of ${groups.groups[call.group]!.role}`;
}

/** One cell of the matrix while it is filled. */
interface Sums {
  bytes: number;
  messageBytes: number;
  messageNs: number;
  slowest: { gbps: number; of: string; isOwn: boolean } | null;
}

/**
 * What passes from each part (rows) to each other (columns), row by row; null where nothing does.
 *
 * Messages pass from their sender to their receiver. Of a collective only the bytes on the bus are known: they are spread
 * evenly over the pairs of its group.
 */
export function matrix(parts: readonly Part[], groups: Groups, messages: Columns, kind: string): (Flow | null)[] {
  const partOf = new Map(parts.flatMap(({ ranks }, part) => ranks.map((rank) => [rank, part] as const)));
  const cells: (Sums | undefined)[] = new Array(parts.length ** 2);
  const cell = (from: number, to: number): Sums => {
    const index = from * parts.length + to;
    const sums = cells[index] ?? { bytes: 0, messageBytes: 0, messageNs: 0, slowest: null };
    cells[index] = sums;
    return sums;
  };
  if (kind === ALL || kind === MESSAGES) addMessages(messages, partOf, cell);
  for (const call of groups.calls) {
    if (!isMessage(call) && (kind === ALL || kind === kindOf(groups, call))) addCollective(groups, call, partOf, cell);
  }
  return Array.from(cells, (sums) => (sums ? flow(sums) : null));
}

type CellOf = (from: number, to: number) => Sums;

function addMessages(messages: Columns, partOf: ReadonlyMap<number, number>, cell: CellOf): void {
  const [sender, receiver, bytes] = [messages.of("sender"), messages.of("receiver"), messages.of("bytes")];
  const [largeBytes, largeNs] = [messages.of("large_bytes"), messages.of("large_ns")];
  for (let row = 0; row < messages.length; row++) {
    const [from, to] = [partOf.get(sender[row]!), partOf.get(receiver[row]!)];
    if (from === undefined || to === undefined) continue;
    const sums = cell(from, to);
    sums.bytes += bytes[row]!;
    sums.messageBytes += largeBytes[row]!;
    sums.messageNs += largeNs[row]!;
  }
}

function addCollective(groups: Groups, call: GroupCall, partOf: ReadonlyMap<number, number>, cell: CellOf): void {
  const { ranks, role } = groups.groups[call.group]!;
  const members = new Map<number, number>();
  for (const rank of ranks) {
    const part = partOf.get(rank);
    if (part !== undefined) members.set(part, (members.get(part) ?? 0) + 1);
  }
  const ofPair = call.bus_bytes / (ranks.length * (ranks.length - 1));
  const gbps = call.quantiles_gbps?.[2] ?? null;
  for (const [from, senders] of members) {
    for (const [to, receivers] of members) {
      const pairs = from === to ? senders * (senders - 1) : senders * receivers;
      if (!pairs) continue;
      const sums = cell(from, to);
      sums.bytes += pairs * ofPair;
      if (gbps === null) continue;
      const isOwn = from === to ? members.size === 1 : members.size === 2;
      const slowest = sums.slowest;
      if (!slowest || (isOwn !== slowest.isOwn ? isOwn : gbps < slowest.gbps)) {
        sums.slowest = { gbps, of: `${call.operation} of ${role}, ${ranks.length} ranks`, isOwn };
      }
    }
  }
}

function flow({ bytes, messageBytes, messageNs, slowest }: Sums): Flow {
  const own = messageNs > 0 ? messageBytes / messageNs : null;
  if (own !== null && !(slowest?.isOwn && slowest.gbps < own)) return { bytes, gbps: own, of: MESSAGES, isOwn: true };
  return { bytes, gbps: slowest?.gbps ?? null, of: slowest?.of ?? "", isOwn: slowest?.isOwn ?? false };
}

/** Each bandwidth as a share of the median of cells with the same traffic, within a node or between nodes. */
export function besideSimilar(parts: readonly Part[], flows: readonly (Flow | null)[]): (number | null)[] {
  const kind = (flow: Flow, index: number) => {
    const [from, to] = [parts[Math.floor(index / parts.length)]!, parts[index % parts.length]!];
    return `${flow.of} ${from.host !== null && from.host === to.host}`;
  };
  const similar = new Map<string, number[]>();
  flows.forEach((flow, index) => {
    if (flow?.gbps == null) return;
    const own = similar.get(kind(flow, index));
    if (own) own.push(flow.gbps);
    else similar.set(kind(flow, index), [flow.gbps]);
  });
  const medians = new Map([...similar].map(([name, values]) => [name, median(values)]));
  return flows.map((flow, index) => (flow?.gbps == null ? null : flow.gbps / medians.get(kind(flow, index))!));
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1]! + sorted[sorted.length >> 1]!) / 2;
}

/** Ranks as parts, neighbours together where there are more than `most`. */
export function partsOfRanks(ranks: readonly { rank: number; host: string }[], most: number): Part[] {
  const sorted = [...ranks].sort((a, b) => a.rank - b.rank);
  const together = Math.max(1, Math.ceil(sorted.length / most));
  return Array.from({ length: Math.ceil(sorted.length / together) }, (_, index) => {
    const own = sorted.slice(index * together, (index + 1) * together);
    const [first, last] = [own[0]!, own.at(-1)!];
    return {
      name: own.length > 1 ? `ranks ${first.rank}–${last.rank}` : `rank ${first.rank}`,
      ranks: own.map(({ rank }) => rank),
      host: own.every(({ host }) => host === first.host) ? first.host : null,
    };
  });
}

export function partsOfNodes(ranks: readonly { rank: number; host: string }[]): Part[] {
  const nodes = new Map<string, number[]>();
  for (const { rank, host } of ranks) {
    const own = nodes.get(host);
    if (own) own.push(rank);
    else nodes.set(host, [rank]);
  }
  const collator = new Intl.Collator("en", { numeric: true });
  return [...nodes]
    .map(([host, own]) => ({ name: host, ranks: own, host }))
    .sort((a, b) => collator.compare(a.name, b.name));
}
