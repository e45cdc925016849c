import { Columns } from "../data/columns";
import type { Outline } from "../data/types";

export const BOX_TABLES = ["work", "stalls", "host", "communication"] as const;
export type BoxTable = (typeof BOX_TABLES)[number];

/** A box of a step: a row of one of the tables of a rank. `rank` is the rank's index in the outline. */
export interface Box {
  table: BoxTable;
  rank: number;
  row: number;
}

export const BUBBLE = "bubble";

const EMPTY = new Columns(0, new Map());

/** One step: its ranks, and the boxes of the ranks that were read. */
export class Step {
  readonly from: Float64Array; // begin of the step on each rank of the outline; NaN where it has none
  readonly to: Float64Array;
  private readonly own: Float64Array;
  private readonly hasBoxes: Uint8Array;
  private readonly expected = new Set<number>(); // ranks whose boxes were read, or are being read
  private readonly read = new Set<number>();
  private readonly boxes: Record<BoxTable, Map<number, Columns>> = {
    work: new Map(),
    stalls: new Map(),
    host: new Map(),
    communication: new Map(),
  };
  private readonly indices: Map<number, number>; // by number of the rank
  private byJoin: Map<number, Box[]> | null = null;

  /** `ranks` are the begin, the end and the own work of the step on each rank. */
  constructor(
    readonly name: string, // of its resources
    readonly number: number,
    readonly duration: number,
    readonly outline: Outline,
    ranks: Columns,
  ) {
    const count = outline.ranks.length;
    this.indices = new Map(outline.ranks.map(({ rank }, index) => [rank, index]));
    this.from = new Float64Array(count).fill(Number.NaN);
    this.to = new Float64Array(count).fill(Number.NaN);
    this.own = new Float64Array(count);
    this.hasBoxes = new Uint8Array(count);
    const [rank, start, end] = [ranks.of("rank"), ranks.of("start"), ranks.of("end")];
    const [own, hasBoxes] = [ranks.of("own"), ranks.of("has_boxes")];
    for (let row = 0; row < ranks.length; row++) {
      const index = rank[row]!;
      this.from[index] = start[row]!;
      this.to[index] = end[row]!;
      this.own[index] = own[row]!;
      this.hasBoxes[index] = hasBoxes[row]!;
    }
  }

  /** The length of the step, ns: the mean over its ranks. Neighbouring steps overlap in `duration`, from the first begin to the last end. */
  get length(): number {
    const lengths = [...this.to].map((end, rank) => end - this.from[rank]!).filter((ns) => !Number.isNaN(ns));
    return lengths.reduce((sum, ns) => sum + ns, 0) / Math.max(lengths.length, 1);
  }

  // ---- which boxes are there

  has(rank: number): boolean {
    return !Number.isNaN(this.from[rank]);
  }

  get ranksWithBoxes(): number[] {
    return [...this.hasBoxes.keys()].filter((rank) => this.hasBoxes[rank]);
  }

  /** Whether the source has no boxes of a rank of this step. */
  isLeftOut(rank: number): boolean {
    return this.has(rank) && !this.hasBoxes[rank];
  }

  /** Whether the boxes of a rank could be read, and nobody did. */
  isMissing(rank: number): boolean {
    return this.hasBoxes[rank] === 1 && !this.expected.has(rank);
  }

  /** Whether the boxes of a rank are there. */
  isRead(rank: number): boolean {
    return this.read.has(rank);
  }

  expect(ranks: readonly number[]): void {
    for (const rank of ranks) this.expected.add(rank);
  }

  forget(ranks: readonly number[]): void {
    for (const rank of ranks) this.expected.delete(rank);
  }

  /** Adds the boxes of ranks, whose rows are consecutive in each table. */
  add(ranks: readonly number[], tables: Record<BoxTable, Columns>): void {
    for (const table of BOX_TABLES) {
      for (const [rank, columns] of tables[table].byRank()) this.boxes[table].set(rank, columns);
    }
    for (const rank of ranks) this.read.add(rank);
    this.byJoin = null;
  }

  /** The boxes of a rank; none if they were not read. */
  columns(table: BoxTable, rank: number): Columns {
    return this.boxes[table].get(rank) ?? EMPTY;
  }

  // ---- facts of a box

  value(box: Box, column: string): number {
    return this.columns(box.table, box.rank).of(column)[box.row]!;
  }

  /** A value of a column that not every table has; −1, for not applicable, where there is none. */
  optional(box: Box, column: string): number {
    return this.columns(box.table, box.rank).has(column) ? this.value(box, column) : -1;
  }

  start(box: Box): number {
    return this.value(box, "start");
  }

  end(box: Box): number {
    return this.value(box, "start") + this.value(box, "duration");
  }

  /** The communication that a box is, or that a stall waits for. */
  communicationOf(box: Box): Box | null {
    if (box.table === "communication") return box;
    if (box.table !== "stalls") return null;
    const row = this.value(box, "communication");
    return row < 0 ? null : { table: "communication", rank: box.rank, row };
  }

  /** The ranks of a communication, by index: the members of its group, or both ends of a message. */
  membersOf(communication: Box): number[] {
    const peer = this.value(communication, "peer");
    if (peer >= 0) return [communication.rank, this.indexOf(peer)].filter((index) => index >= 0);
    const lane = this.outline.ranks[communication.rank]!.lanes[this.value(communication, "lane")]!;
    return lane.ranks.map((rank) => this.indexOf(rank)).filter((index) => index >= 0);
  }

  /** The same communication on all ranks that were read, this one included; sorted by start, the last to come last. */
  participants(communication: Box): Box[] {
    const join = this.optional(communication, "join");
    if (join < 0) return [communication];
    return this.joins().get(join) ?? [communication];
  }

  /** Error of the difference of two boxes' times, ns; null where the clocks of their hosts were not aligned. */
  residual(a: Box, b: Box): number | null {
    const { residual_ns: residual, ranks } = this.outline;
    if (residual) return residual.p99;
    return ranks[a.rank]!.host === ranks[b.rank]!.host ? 0 : null;
  }

  /** The last of participants to begin; null where the clocks are not exact enough to say. */
  lastToCome(participants: readonly Box[]): Box | null {
    const [before, last] = participants.slice(-2);
    if (!before || !last) return null;
    const everyHost = participants.map((box) => this.residual(box, last));
    if (everyHost.includes(null)) return null;
    return this.start(last) - this.start(before) < this.residual(before, last)! ? null : last;
  }

  /** Time of a rank outside of stalls: its own work, ns. */
  busy(rank: number): number {
    return this.own[rank]!;
  }

  /** Index of a rank in the outline, by its number; −1 if it is not there. */
  indexOf(rank: number): number {
    return this.indices.get(rank) ?? -1;
  }

  private joins(): Map<number, Box[]> {
    if (this.byJoin) return this.byJoin;
    const found = new Map<number, Box[]>();
    for (const [rank, columns] of this.boxes.communication) {
      const join = columns.of("join");
      for (let row = 0; row < columns.length; row++) {
        if (join[row]! < 0) continue;
        const box: Box = { table: "communication", rank, row };
        const known = found.get(join[row]!);
        if (known) known.push(box);
        else found.set(join[row]!, [box]);
      }
    }
    for (const boxes of found.values()) boxes.sort((a, b) => this.start(a) - this.start(b) || a.rank - b.rank);
    this.byJoin = found;
    return found;
  }
}

export function sameBox(a: Box | null, b: Box | null): boolean {
  return a !== null && b !== null && a.table === b.table && a.rank === b.rank && a.row === b.row;
}
