// A uPlot chart as wide as its holder, in the colours of the theme, with a note at the pointer and keys to walk its points.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { element } from "./dom";
import type { Theme } from "./theme";

const NEAR = 24; // px within which a point is at the pointer
const CLICK = 4; // a pointer that moved less was a click

export interface Point {
  left: number; // px, in the plot
  top: number;
}

/** The points of a chart, by number. */
export interface Points {
  count: number;
  place(plot: uPlot, index: number): Point;
  /** Points near a place along the x axis; all if it is left out. */
  near?(plot: uPlot, left: number): Iterable<number>;
  /** A headline, and lines below it. */
  note(index: number): string[];
  pick?(index: number): void;
}

export type Draw = (context: CanvasRenderingContext2D, plot: uPlot) => void;

/** Axes, scales and series of a chart. */
export type ChartOptions = Omit<uPlot.Options, "width" | "height" | "hooks" | "cursor" | "legend">;

export class Chart {
  readonly plot: uPlot;
  private current: number | null = null;
  private pressed: number | null = null;
  private readonly removed = new AbortController();
  private readonly note = element("div", "", "tooltip");
  private readonly spoken = element("div", "", "spoken");

  constructor(
    private readonly holder: HTMLElement,
    theme: Theme,
    label: string,
    private readonly height: number,
    options: ChartOptions,
    data: uPlot.AlignedData,
    private readonly points: Points,
    draw: Draw,
  ) {
    const size = { width: this.width, height };
    const plain = { legend: { show: false }, cursor: { y: false, points: { show: false } } };
    const drawn = (plot: uPlot) => clipped(plot, () => draw(plot.ctx, plot));
    this.plot = new uPlot({ ...options, ...size, ...plain, hooks: { draw: [drawn] } }, data, holder);
    this.note.hidden = true;
    this.spoken.ariaLive = "polite";
    holder.append(this.note, this.spoken);
    const { root, over } = this.plot;
    root.tabIndex = 0;
    root.role = "application";
    root.ariaLabel = `${label}. Arrow keys walk along its points${points.pick ? ", Enter shows one" : ""}.`;
    over.addEventListener("pointermove", (event) => this.show(this.at(event.offsetX, event.offsetY)));
    over.addEventListener("pointerleave", () => this.show(null));
    over.addEventListener("pointerdown", (event) => {
      this.pressed = event.clientX;
    });
    over.addEventListener("click", (event) => {
      const wasClick = this.pressed !== null && Math.abs(event.clientX - this.pressed) < CLICK;
      if (wasClick && this.current !== null) points.pick?.(this.current);
    });
    root.addEventListener("keydown", (event) => this.onKey(event));
    root.addEventListener("blur", () => this.show(null));
    const resize = () => this.plot.setSize({ width: this.width, height: this.height });
    window.addEventListener("resize", resize, { signal: this.removed.signal });
    theme.onChange(() => this.removed.signal.aborted || this.plot.redraw());
  }

  remove(): void {
    this.removed.abort();
    this.plot.destroy();
    this.note.remove();
    this.spoken.remove();
  }

  private get width(): number {
    return Math.max(this.holder.clientWidth, 200);
  }

  private at(left: number, top: number): number | null {
    const { plot, points } = this;
    let [best, least] = [null as number | null, NEAR];
    for (const index of points.near?.(plot, left) ?? Array.from({ length: points.count }, (_, index) => index)) {
      const place = points.place(plot, index);
      const distance = Math.hypot(place.left - left, place.top - top);
      if (distance < least) [best, least] = [index, distance];
    }
    return best;
  }

  private onKey(event: KeyboardEvent): void {
    const { count } = this.points;
    const current = this.current ?? -1;
    const goals: Record<string, number> = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: count - 1 };
    const goal = goals[event.key];
    if (event.key === "Enter" && this.current !== null) this.points.pick?.(this.current);
    else if (goal !== undefined && count) this.show(Math.min(Math.max(goal, 0), count - 1));
    else return;
    event.preventDefault();
  }

  private show(index: number | null): void {
    this.current = index;
    this.note.hidden = index === null;
    this.plot.over.style.cursor = index !== null && this.points.pick ? "pointer" : "";
    if (index === null) return;
    const [headline, ...lines] = this.points.note(index);
    this.spoken.textContent = [headline, ...lines].join(", ");
    this.note.replaceChildren(element("strong", headline), ...lines.map((line) => element("div", line)));
    const { left, top } = this.points.place(this.plot, index);
    const box = this.plot.over.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.note;
    const right = box.left + left + 14;
    this.note.style.left = `${right + width > window.innerWidth ? right - width - 28 : right}px`;
    this.note.style.top = `${Math.max(4, box.top + top - height - 10)}px`;
  }
}

/** Distances of the ticks of an axis of whole numbers. */
export const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();

/** Labels of ticks one by one; a logarithmic axis has null for those that it leaves out. */
export function each(label: (tick: number) => string): (ticks: number[]) => string[] {
  return (ticks) => ticks.map((tick) => (tick === null ? "" : label(tick)));
}

/** An axis in the colours of the theme; `steps` are the distances that ticks may have. */
export function axis(theme: Theme, labels: (ticks: number[]) => string[], size = 56, steps?: number[]): uPlot.Axis {
  return {
    ...(steps ? { incrs: steps } : {}),
    stroke: () => theme.of("muted"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: () => theme.of("line"), width: 1 },
    ticks: { stroke: () => theme.of("line"), width: 1 },
    size,
    values: (_, ticks) => labels(ticks),
  };
}

/** Ticks of a logarithmic axis: powers of ten, and 2 and 5 times them where there is room. */
export function logTicks(low: number, high: number): number[] {
  const factors = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  const first = Math.floor(Math.log10(low));
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, at) => 10 ** (first + at));
  return powers
    .flatMap((power) => factors.map((factor) => factor * power))
    .filter((tick) => tick >= low && tick <= high);
}

function clipped(plot: uPlot, draw: () => void): void {
  const { ctx, bbox } = plot;
  const margin = 8 * devicePixelRatio; // marks at the edge stay whole
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - margin, bbox.top - margin, bbox.width + 2 * margin, bbox.height + 2 * margin);
  ctx.clip();
  draw();
  ctx.restore();
}
