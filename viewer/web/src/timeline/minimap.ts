// The whole step in small: how busy the ranks of each group are, and the window that the timeline shows.

import type { Theme } from "../theme";
import { type Grouping, GUTTER, groupsOf } from "./layout";
import type { Step } from "./step";
import type { Viewport } from "./viewport";

const BINS = 600;
const MOST_ROWS = 8;
const MOST_RANKS = 8; // of a group: more would look alike, and take long
export const MINIMAP_HEIGHT = 24;

export class Minimap {
  private rows: Float64Array[] = [];
  private step: Step | null = null;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly theme: Theme,
    private readonly viewport: Viewport,
    look: (centre: number) => void,
  ) {
    const move = (event: PointerEvent) => event.buttons & 1 && this.step && look(this.time(event.offsetX));
    canvas.addEventListener("pointerdown", move);
    canvas.addEventListener("pointermove", move);
    theme.onChange(() => this.draw());
  }

  show(step: Step, grouping: Grouping): void {
    this.step = step;
    const groups = [...groupsOf(step, grouping === "none" ? "stage" : grouping).values()];
    const every = Math.ceil(groups.length / MOST_ROWS);
    this.rows = groups.filter((_, index) => index % every === 0).map((ranks) => busyShare(step, ranks));
    this.draw();
  }

  draw(): void {
    const { step, theme } = this;
    if (!step) return;
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.parentElement!.clientWidth;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(MINIMAP_HEIGHT * ratio);
    this.canvas.style.width = `${width}px`;
    const c = this.canvas.getContext("2d")!;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = theme.of("row");
    c.fillRect(GUTTER, 0, width - GUTTER, MINIMAP_HEIGHT);
    c.fillStyle = theme.of("compute");
    const height = MINIMAP_HEIGHT / Math.max(this.rows.length, 1);
    const bin = (width - GUTTER) / BINS;
    this.rows.forEach((shares, row) => {
      shares.forEach((share, index) => {
        if (share <= 0) return;
        c.globalAlpha = share;
        c.fillRect(GUTTER + index * bin, row * height, bin + 0.5, Math.max(height - 1, 1));
      });
    });
    c.globalAlpha = 1;
    this.drawWindow(c, width);
  }

  private drawWindow(c: CanvasRenderingContext2D, width: number): void {
    const x = (time: number) => GUTTER + Math.min(Math.max(time / this.step!.duration, 0), 1) * (width - GUTTER);
    const [from, to] = [x(this.viewport.from), x(this.viewport.to)];
    c.fillStyle = this.theme.of("surface");
    c.globalAlpha = 0.6;
    c.fillRect(GUTTER, 0, from - GUTTER, MINIMAP_HEIGHT);
    c.fillRect(to, 0, width - to, MINIMAP_HEIGHT);
    c.globalAlpha = 1;
    c.strokeStyle = this.theme.of("accent");
    c.strokeRect(from + 0.5, 0.5, Math.max(to - from - 1, 2), MINIMAP_HEIGHT - 1);
  }

  private time(x: number): number {
    const width = this.canvas.parentElement!.clientWidth;
    return ((x - GUTTER) / (width - GUTTER)) * this.step!.duration;
  }
}

/** Share of each bin of the step in which ranks are in a phase and do not stall, from 0 to 1; of the first that were read. */
export function busyShare(step: Step, all: readonly number[]): Float64Array {
  const ranks = all.filter((rank) => step.columns("work", rank).length).slice(0, MOST_RANKS);
  const shares = new Float64Array(BINS);
  const bin = step.duration / BINS;
  const add = (table: "work" | "stalls", rank: number, sign: number) => {
    const columns = step.columns(table, rank);
    const [start, duration, depth] = [columns.of("start"), columns.of("duration"), columns.of("depth")];
    for (let row = 0; row < columns.length; row++) {
      if (table === "work" ? depth[row]! > 0 : depth[row] === 0) continue; // outermost work, and stalls inside of it
      const [from, to] = [Math.max(start[row]!, 0), Math.min(start[row]! + duration[row]!, step.duration)];
      for (let index = Math.floor(from / bin); index < BINS && index * bin < to; index++) {
        shares[index]! += (sign * (Math.min((index + 1) * bin, to) - Math.max(index * bin, from))) / bin / ranks.length;
      }
    }
  };
  for (const rank of ranks) {
    add("work", rank, 1);
    add("stalls", rank, -1);
  }
  return shares.map((share) => Math.min(Math.max(share, 0), 1));
}
