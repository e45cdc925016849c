// The timeline: a canvas that stays in view of a scrolled element as high as all rows, and what hands do to it.

import { element } from "../dom";
import type { Theme } from "../theme";
import { type Fact, facts, headline, kindOf } from "./facts";
import { type Grouping, GUTTER, HEADING, type Layout, layOut, MAIN, type Row, RULER } from "./layout";
import type { Overlay } from "./overlay";
import { type ColourBy, type DrawnBox, Painter, type Scene, type TimeRange } from "./painter";
import { type Box, type Step, sameBox } from "./step";
import { Viewport } from "./viewport";

const LEAST_HEIGHT = 300;
const BELOW = 28; // px of the window that are left below the rows
const CLICK = 4; // a pointer that moved less was a click

export interface TimelineEvents {
  onPin(box: Box | null): void;
  onSelect(range: TimeRange | null): void;
  onMove(): void; // another window, or other rows
  onMissing(ranks: number[]): void; // rows are in view whose boxes were not read
}

interface Drag {
  x: number;
  y: number;
  moved: number;
  selectFrom: number | null;
}

export class Timeline {
  readonly viewport = new Viewport();
  step: Step | null = null;
  grouping: Grouping = "none";
  colourBy: ColourBy = "kind";
  planned: Step | null = null;
  overlay: Overlay | null = null;
  named: ReadonlySet<number> = new Set(); // numbers of ranks that findings name
  kept: ReadonlySet<number> = new Set(); // of those whose rows are shown though their group is closed
  marked: ReadonlySet<number> = new Set(); // of those that the reader looks at
  pinned: Box | null = null;
  selected: TimeRange | null = null;
  readonly openGroups = new Set<string>();
  readonly openRanks = new Set<number>();
  private title = "";
  private layout: Layout = { rows: [], height: 0 };
  private hovered: Box | null = null;
  private pointerX: number | null = null;
  private drag: Drag | null = null;
  private scheduled = false;
  private readonly painter: Painter;
  private readonly context: CanvasRenderingContext2D;
  private readonly spacer = element("div");

  constructor(
    private readonly scroller: HTMLElement,
    private readonly canvas: HTMLCanvasElement,
    private readonly tooltip: HTMLElement,
    theme: Theme,
    private readonly events: TimelineEvents,
  ) {
    this.context = canvas.getContext("2d")!;
    this.painter = new Painter(this.context, theme);
    this.scroller.append(this.spacer);
    this.listen();
    theme.onChange(() => this.draw()); // at once: a page that is printed has no next frame
  }

  show(step: Step, title: string): void {
    this.step = step;
    this.title = title;
    this.pin(null);
    this.select(null);
    this.viewport.limit(step.duration, step.outline.residual_ns?.p99 ?? 0);
    this.layOut();
    this.viewport.fit(); // with the window of a shorter step, what made this one long would be cut off
    this.redraw();
  }

  // ---- what is shown

  get ranks(): number[] {
    return this.layout.rows.flatMap((row) => (row.type === "rank" ? [row.rank] : []));
  }

  /** Indices of the ranks whose rows are in view, and of those a screen above and below. */
  get visibleRanks(): number[] {
    const [top, height] = [this.scroller.scrollTop, this.canvasHeight];
    return this.layout.rows.flatMap((row) =>
      row.type === "rank" && row.y + row.height > top - height && row.y < top + 2 * height ? [row.rank] : [],
    );
  }

  layOut(): void {
    if (!this.step) return;
    this.layout = layOut(this.step, this.grouping, this.openGroups, this.openRanks, this.kept);
    this.resize();
    this.events.onMove();
  }

  fit(): void {
    this.viewport.fit();
    this.moved();
  }

  zoom(factor: number, at?: number): void {
    this.viewport.zoom(factor, at);
    this.moved();
  }

  pan(pixels: number): void {
    this.viewport.pan(pixels);
    this.moved();
  }

  look(from: number, to: number): void {
    this.viewport.look(from, to);
    this.moved();
  }

  scrollBy(pixels: number): void {
    this.scroller.scrollTop += pixels;
  }

  setGrouping(grouping: Grouping): void {
    this.grouping = grouping;
    this.openGroups.clear();
    this.layOut();
  }

  toggleGroup(key: string): void {
    if (!this.openGroups.delete(key)) this.openGroups.add(key);
    this.layOut();
  }

  /** Opens or closes the communication lanes of a rank, by its index. */
  toggleRank(rank: number): void {
    if (!this.openRanks.delete(rank)) this.openRanks.add(rank);
    this.layOut();
  }

  /** Shows the communication lanes of all ranks, or of none if all are shown; returns whether they are shown. */
  toggleLanes(): boolean {
    const shown = this.ranks;
    const all = shown.every((rank) => this.openRanks.has(rank));
    this.openRanks.clear();
    if (!all) for (const rank of shown) this.openRanks.add(rank);
    this.layOut();
    return !all;
  }

  pin(box: Box | null): void {
    this.pinned = box;
    this.tooltip.hidden = true; // its facts are beside the canvas now
    this.events.onPin(box);
    this.redraw();
  }

  select(range: TimeRange | null): void {
    this.selected = range;
    this.tooltip.hidden = true;
    this.events.onSelect(range);
    this.redraw();
  }

  /** Brings a rank into view, opening its group. */
  reveal(rank: number): void {
    if (!this.step) return;
    let row = this.rowOf(rank);
    if (!row) {
      const group = this.layout.rows.find((candidate) => candidate.type === "group" && candidate.ranks.includes(rank));
      if (group?.type === "group") this.openGroups.add(group.key);
      this.layOut();
      row = this.rowOf(rank);
    }
    if (row && !this.isInView(row)) this.scroller.scrollTop = Math.max(0, row.y - 2 * MAIN);
    this.redraw();
  }

  private isInView(row: Row): boolean {
    const top = this.scroller.scrollTop;
    return row.y >= top && row.y + row.height <= top + this.canvasHeight - RULER;
  }

  /** Pins a box and brings it into view, with half as much again around it where the window does not hold it. */
  goTo(box: Box): void {
    if (!this.step) return;
    this.reveal(box.rank);
    const [start, end] = [this.step.start(box), this.step.end(box)];
    const fits = start >= this.viewport.from && end <= this.viewport.to;
    const visible = (end - start) / this.viewport.perPixel > 3;
    if (!fits || !visible) this.viewport.look(start - (end - start) * 3 - 1, end + (end - start) * 3 + 1);
    this.pin(box);
    this.moved();
  }

  /** What is drawn, for tests. */
  visibleBoxes(): object[] {
    const { step } = this;
    if (!step) return [];
    return this.painter.boxes.map((box) => ({
      x: box.x,
      y: box.y,
      width: box.width,
      height: box.height,
      table: box.table,
      rank: step.outline.ranks[box.rank]!.rank,
      kind: kindOf(step, box),
      microbatch: step.optional(box, "microbatch"),
      chunk: step.optional(box, "chunk"),
      headline: headline(step, box),
    }));
  }

  // ---- drawing

  redraw(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  private moved(): void {
    this.events.onMove();
    this.redraw();
  }

  private draw(): void {
    if (!this.step) return;
    const missing = this.visibleRanks.filter((rank) => this.step?.isMissing(rank));
    if (missing.length) this.events.onMissing(missing);
    const scene: Scene = {
      step: this.step,
      layout: this.layout,
      viewport: this.viewport,
      scroll: this.scroller.scrollTop,
      title: this.title,
      named: this.named,
      marked: this.marked,
      colourBy: this.colourBy,
      hovered: this.hovered,
      pinned: this.pinned,
      pointerX: this.pointerX,
      selected: this.selected,
      planned: this.planned,
      overlay: this.overlay,
    };
    this.painter.draw(scene, this.viewport.width, this.canvasHeight);
  }

  private get canvasHeight(): number {
    const top = this.scroller.getBoundingClientRect().top + window.scrollY;
    const most = Math.max(LEAST_HEIGHT, Math.round(window.innerHeight - top - BELOW));
    return Math.min(RULER + this.layout.height, most);
  }

  private resize(): void {
    const height = this.canvasHeight;
    this.scroller.style.height = `${height}px`;
    this.spacer.style.height = `${RULER + this.layout.height - height}px`;
    const width = this.scroller.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    this.viewport.width = width;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.redraw();
  }

  // ---- pointer and keyboard

  private listen(): void {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onPointerMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointercancel", () => this.endDrag());
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", (event) => this.onDoubleClick(event));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.scroller.addEventListener("scroll", () => this.moved());
    window.addEventListener("resize", () => {
      this.layOut();
      this.draw(); // at once, too: a canvas is empty after a change of its size
    });
  }

  // A plain wheel scrolls the rows, and the page where they end; ctrl or ⌘ zooms, and sideways pans.
  private onWheel(event: WheelEvent): void {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.0025), Math.max(event.offsetX, GUTTER));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(event.deltaX || event.deltaY);
    }
  }

  private onDown(event: PointerEvent): void {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    const selectFrom = event.shiftKey && event.offsetX >= GUTTER ? this.viewport.time(event.offsetX) : null;
    this.drag = { x: event.offsetX, y: event.offsetY, moved: 0, selectFrom };
  }

  private onPointerMove(event: PointerEvent): void {
    if (!this.drag) {
      this.hover(event);
      return;
    }
    const [dx, dy] = [event.offsetX - this.drag.x, event.offsetY - this.drag.y];
    this.drag = {
      ...this.drag,
      x: event.offsetX,
      y: event.offsetY,
      moved: this.drag.moved + Math.abs(dx) + Math.abs(dy),
    };
    if (this.drag.selectFrom !== null) {
      const to = this.viewport.time(Math.max(event.offsetX, GUTTER));
      this.selected = { from: Math.min(this.drag.selectFrom, to), to: Math.max(this.drag.selectFrom, to) };
      this.redraw();
      return;
    }
    this.canvas.classList.add("dragging");
    this.viewport.pan(-dx);
    this.scroller.scrollTop -= dy;
    this.moved();
  }

  private onUp(event: PointerEvent): void {
    const { drag } = this;
    this.endDrag();
    if (!drag) return;
    if (drag.selectFrom !== null && drag.moved >= CLICK) this.select(this.selected);
    else if (drag.moved < CLICK) this.click(event.offsetX, event.offsetY);
  }

  private endDrag(): void {
    this.drag = null;
    this.canvas.classList.remove("dragging");
  }

  private click(x: number, y: number): void {
    const row = this.rowAt(y);
    if (row?.type === "group") this.toggleGroup(row.key);
    else if (x < GUTTER) {
      const top = row && y - RULER + this.scroller.scrollTop < row.y + MAIN;
      if (row?.type === "rank" && top) this.toggleRank(row.rank);
    } else {
      const box = this.boxAt(x, y);
      this.select(null);
      this.pin(sameBox(box, this.pinned) ? null : box);
    }
  }

  private onDoubleClick(event: MouseEvent): void {
    const box = this.boxAt(event.offsetX, event.offsetY);
    if (!box || !this.step || event.offsetX < GUTTER) return;
    const [start, end] = [this.step.start(box), this.step.end(box)];
    this.look(start - (end - start) * 0.25, end + (end - start) * 0.25);
  }

  private onKey(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves: Record<string, () => void> = {
      ArrowLeft: () => this.pan(-80),
      a: () => this.pan(-80),
      ArrowRight: () => this.pan(80),
      d: () => this.pan(80),
      ArrowUp: () => this.scrollBy(-MAIN),
      ArrowDown: () => this.scrollBy(MAIN),
      PageUp: () => this.scrollBy(-this.canvasHeight / 2),
      PageDown: () => this.scrollBy(this.canvasHeight / 2),
      "+": () => this.zoom(0.7),
      "=": () => this.zoom(0.7),
      w: () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7),
      s: () => this.zoom(1 / 0.7),
      "0": () => this.fit(),
      Home: () => this.fit(),
      f: () => this.selected && this.look(this.selected.from, this.selected.to),
      Escape: () => {
        this.select(null);
        this.pin(null);
      },
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  }

  private leave(): void {
    this.pointerX = null;
    this.hovered = null;
    this.tooltip.hidden = true;
    this.redraw();
  }

  private hover(event: PointerEvent): void {
    this.pointerX = event.offsetX;
    this.hovered = event.offsetX >= GUTTER ? this.boxAt(event.offsetX, event.offsetY) : null;
    this.tooltip.hidden = !this.hovered || sameBox(this.hovered, this.pinned);
    if (this.hovered && this.step) {
      const list = element("dl");
      for (const fact of facts(this.step, this.hovered)) list.append(...factNodes(fact));
      this.tooltip.replaceChildren(element("strong", headline(this.step, this.hovered)), list);
      const { offsetWidth: width, offsetHeight: height } = this.tooltip;
      const left = event.clientX + 14 + width > window.innerWidth ? event.clientX - width - 14 : event.clientX + 14;
      const top = event.clientY + 14 + height > window.innerHeight ? event.clientY - height - 14 : event.clientY + 14;
      this.tooltip.style.left = `${Math.max(4, left)}px`;
      this.tooltip.style.top = `${Math.max(4, top)}px`;
    }
    this.redraw();
  }

  private boxAt(x: number, y: number): DrawnBox | null {
    if (y < RULER) return null;
    const { boxes } = this.painter;
    for (let index = boxes.length - 1; index >= 0; index--) {
      const box = boxes[index]!;
      if (x >= box.x - 1 && x <= box.x + box.width + 1 && y >= box.y && y < box.y + box.height) return box;
    }
    return null;
  }

  private rowAt(y: number): Row | null {
    if (y < RULER) return null;
    const at = y - RULER + this.scroller.scrollTop;
    return (
      this.layout.rows.find((row) => at >= row.y && at < row.y + (row.type === "group" ? HEADING : row.height)) ?? null
    );
  }

  private rowOf(rank: number): Row | undefined {
    return this.layout.rows.find((row) => row.type === "rank" && row.rank === rank);
  }
}

export function factNodes([term, value]: Fact): HTMLElement[] {
  return [element("dt", term), element("dd", value)];
}
