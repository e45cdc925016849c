// The steps of a run along an axis: their numbers, or the time at which they began.

import type { Overview } from "../data/overview";

export type Along = "step" | "time";

export interface RunEvent {
  kind: string;
  start: number; // ns after the begin of the run
  duration: number;
}

export class RunSteps {
  readonly length: number;
  readonly step: ArrayLike<number>;
  readonly start: ArrayLike<number>;
  readonly duration: ArrayLike<number>;
  readonly launch: ArrayLike<number>;
  readonly events: readonly RunEvent[];
  private readonly reason: ArrayLike<number>;
  private readonly outlier: ArrayLike<number>;
  private readonly reasons: readonly string[];

  constructor({ steps, events, terms }: Overview) {
    this.length = steps.length;
    this.step = steps.of("step");
    this.start = steps.of("start");
    this.duration = steps.of("duration");
    this.launch = steps.of("launch");
    this.reason = steps.of("reason");
    this.outlier = steps.of("is_outlier");
    this.reasons = terms.reasons;
    const [kind, start, duration] = [events.of("kind"), events.of("start"), events.of("duration")];
    this.events = Array.from({ length: events.length }, (_, row) => ({
      kind: terms.events[kind[row]!] ?? "",
      start: start[row]!,
      duration: duration[row]!,
    }));
  }

  /** Why a row does not count; empty if it counts. */
  leftOut(row: number): string {
    return this.reasons[this.reason[row]!] ?? "";
  }

  /** Whether a row is drawn on the line: all but warm-up, incomplete and repeated steps. */
  isUsual(row: number): boolean {
    const reason = this.leftOut(row);
    return reason === "" || reason === "not in detail" || reason === "of an earlier launch";
  }

  isOutlier(row: number): boolean {
    return this.outlier[row] === 1;
  }

  /** Rows of the outliers, the longest first. */
  outliers(): number[] {
    return Array.from({ length: this.length }, (_, row) => row)
      .filter((row) => this.isOutlier(row))
      .sort((a, b) => this.duration[b]! - this.duration[a]!);
  }

  /** Rows in ascending order along the axis. */
  order(along: Along): number[] {
    const rows = Array.from({ length: this.length }, (_, row) => row);
    return along === "time" ? rows : rows.sort((a, b) => this.step[a]! - this.step[b]! || a - b);
  }

  at(row: number, along: Along): number {
    return along === "step" ? this.step[row]! : this.start[row]!;
  }

  /** Place of an event: among step numbers, as far into the step that had begun as its time. */
  placeOf(event: RunEvent, along: Along): number {
    if (along === "time") return event.start;
    if (event.kind === "restart") return this.step[this.begunBefore(event.start + event.duration + 1)]!;
    const row = this.begunBefore(event.start);
    const until = row + 1 < this.length ? this.start[row + 1]! : this.start[row]! + this.duration[row]!;
    const part = (event.start - this.start[row]!) / Math.max(until - this.start[row]!, 1);
    return this.step[row]! + Math.min(Math.max(part, 0), 1);
  }

  private begunBefore(time: number): number {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle]! < time) low = middle + 1;
      else high = middle;
    }
    return Math.max(low - 1, 0);
  }
}
