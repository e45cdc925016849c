import type { Column, Columns } from "../data/columns";
import type { StepTables } from "../data/source";
import type { Outline } from "../data/types";

export type BoxTable = "work" | "stalls" | "host" | "communication";

/** A row of one of the tables of a step. */
export interface Box {
  table: BoxTable;
  rank: number; // index among the ranks of the outline
  row: number;
}

export interface RowRange {
  first: number;
  end: number;
}

export const BUBBLE = "bubble";

/** The boxes of one step, by rank. */
export class Step {
  readonly from: Float64Array; // begin of the step on each rank of the outline; NaN where it has none
  readonly to: Float64Array;
  private readonly begins: Record<BoxTable, Int32Array>;
  private byJoin: Map<number, Box[]> | null = null;

  constructor(
    readonly number: number,
    readonly duration: number,
    readonly outline: Outline,
    private readonly tables: StepTables,
  ) {
    const ranks = outline.ranks.length;
    this.from = new Float64Array(ranks).fill(Number.NaN);
    this.to = new Float64Array(ranks).fill(Number.NaN);
    const [rank, start, end] = ["rank", "start", "end"].map((name) => tables.bounds.of(name)) as [
      Column,
      Column,
      Column,
    ];
    for (let row = 0; row < tables.bounds.length; row++) {
      this.from[rank[row]!] = start[row]!;
      this.to[rank[row]!] = end[row]!;
    }
    this.begins = {
      work: tables.work.rankBegins(ranks),
      stalls: tables.stalls.rankBegins(ranks),
      host: tables.host.rankBegins(ranks),
      communication: tables.communication.rankBegins(ranks),
    };
  }

  has(rank: number): boolean {
    return !Number.isNaN(this.from[rank]);
  }

  columns(table: BoxTable): Columns {
    return this.tables[table];
  }

  rows(table: BoxTable, rank: number): RowRange {
    return { first: this.begins[table][rank]!, end: this.begins[table][rank + 1]! };
  }

  value(box: Box, column: string): number {
    return this.tables[box.table].of(column)[box.row]!;
  }

  /** A value of a column that not every table has; −1, for not applicable, where there is none. */
  optional(box: Box, column: string): number {
    return this.tables[box.table].has(column) ? this.value(box, column) : -1;
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
    const position = this.value(box, "communication");
    return position < 0
      ? null
      : { table: "communication", rank: box.rank, row: this.rows("communication", box.rank).first + position };
  }

  /** The same communication on all ranks that took part, this one included; sorted by start, the last to come last. */
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

  /** Time of a rank in which it neither waits nor transfers: its own work, ns. */
  busy(rank: number): number {
    if (!this.has(rank)) return 0;
    const { first, end } = this.rows("stalls", rank);
    const duration = this.tables.stalls.of("duration");
    let stalled = 0;
    for (let row = first; row < end; row++) stalled += duration[row]!;
    return this.to[rank]! - this.from[rank]! - stalled;
  }

  private joins(): Map<number, Box[]> {
    if (this.byJoin) return this.byJoin;
    const found = new Map<number, Box[]>();
    const { communication } = this.tables;
    if (communication.has("join")) {
      const [join, rank, start] = ["join", "rank", "start"].map((name) => communication.of(name)) as [
        Column,
        Column,
        Column,
      ];
      for (let row = 0; row < communication.length; row++) {
        if (join[row]! < 0) continue;
        const box: Box = { table: "communication", rank: rank[row]!, row };
        const known = found.get(join[row]!);
        if (known) known.push(box);
        else found.set(join[row]!, [box]);
      }
      for (const boxes of found.values()) boxes.sort((a, b) => start[a.row]! - start[b.row]! || a.rank - b.rank);
    }
    this.byJoin = found;
    return found;
  }
}

export function sameBox(a: Box | null, b: Box | null): boolean {
  return a !== null && b !== null && a.table === b.table && a.row === b.row;
}
