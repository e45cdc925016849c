// A heat map on a canvas: coloured cells with labels, numbers where there is room, and a cursor for the keyboard.

import { element } from "../dom";
import type { Theme } from "../theme";
import { Ramp } from "./colours";

/** What is drawn. Values and texts are row by row; a value of null is not known. */
export interface HeatCells {
  rows: readonly string[];
  columns: readonly string[];
  values: readonly (number | null)[];
  range: readonly [low: number, high: number];
  lowIsStrong: boolean;
  format(value: number): string;
  /** Lines about a cell, the first one its heading. */
  describe(cell: number): string[];
  onGo?(cell: number): void;
  /** Whether a cell is outlined. */
  isMarked?(cell: number): boolean;
}

const FONT = "11px system-ui, sans-serif";
const AXIS = 20; // px below the cells
const GAP = 8;

export class HeatMap {
  readonly node = element("div", "", "heat-map");
  private readonly canvas = element("canvas");
  private readonly readout = element("p", "", "hint");
  private readonly tooltip = element("div", "", "tooltip");
  private cells: HeatCells | null = null;
  private cursor = -1;
  private gutter = 0;
  private cellWidth = 0;
  private cellHeight = 0;

  constructor(private readonly theme: Theme) {
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.readout.ariaLive = "polite";
    this.tooltip.hidden = true;
    this.node.append(this.canvas, this.readout, this.tooltip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.tooltip.hidden = true;
    });
    this.canvas.addEventListener("click", (event) => this.go(this.cellAt(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("blur", () => this.draw());
    this.canvas.addEventListener("focus", () => this.draw());
    theme.onChange(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  show(cells: HeatCells, label: string): void {
    this.cells = cells;
    this.cursor = -1;
    this.canvas.ariaLabel = `${label}. Arrows move, Enter shows the cell in the timeline.`;
    this.readout.textContent = "";
    this.draw();
  }

  // ---- pointer and keys

  private cellAt(x: number, y: number): number {
    const { cells } = this;
    const column = Math.floor((x - this.gutter) / this.cellWidth);
    const row = Math.floor(y / this.cellHeight);
    const inside = cells && column >= 0 && column < cells.columns.length && row >= 0 && row < cells.rows.length;
    return inside ? row * cells.columns.length + column : -1;
  }

  private point(event: PointerEvent): void {
    const cell = this.cellAt(event.offsetX, event.offsetY);
    this.canvas.style.cursor = this.canGo(cell) ? "pointer" : "default";
    this.tooltip.hidden = cell < 0;
    if (cell < 0) return;
    const [heading, ...lines] = this.cells!.describe(cell);
    this.tooltip.replaceChildren(element("strong", heading), ...lines.map((line) => element("div", line)));
    const { clientWidth } = document.documentElement;
    this.tooltip.style.left = `${Math.min(event.clientX + 14, clientWidth - this.tooltip.offsetWidth - 8)}px`;
    this.tooltip.style.top = `${event.clientY + 14}px`;
  }

  private press(event: KeyboardEvent): void {
    const { cells } = this;
    if (!cells?.values.length || event.ctrlKey || event.metaKey) return;
    const across = cells.columns.length;
    const moves: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across };
    const move = moves[event.key];
    if (move !== undefined) {
      const next = this.cursor < 0 ? 0 : this.cursor + move;
      const leavesRow = Math.abs(move) === 1 && this.cursor >= 0 && rowOf(next, across) !== rowOf(this.cursor, across);
      if (next >= 0 && next < cells.values.length && !leavesRow) this.cursor = next;
      this.readout.textContent = cells.describe(this.cursor).join(" · ");
      this.draw();
    } else if (event.key === "Enter") this.go(this.cursor);
    else return;
    event.preventDefault();
  }

  private canGo(cell: number): boolean {
    return cell >= 0 && this.cells?.onGo !== undefined && this.cells.values[cell] !== null;
  }

  private go(cell: number): void {
    if (this.canGo(cell)) this.cells!.onGo!(cell);
  }

  // ---- drawing

  private draw(): void {
    const { cells, canvas } = this;
    const width = this.node.clientWidth;
    if (!cells || !width) return;
    const context = canvas.getContext("2d")!;
    context.font = FONT;
    const widest = Math.max(0, ...cells.rows.map((row) => context.measureText(row).width));
    this.gutter = Math.min(Math.ceil(widest) + GAP, width / 3);
    this.cellWidth = Math.min((width - this.gutter) / Math.max(cells.columns.length, 1), 96);
    this.cellHeight = Math.min(Math.max(480 / Math.max(cells.rows.length, 1), 3), 24);
    const height = Math.ceil(this.cellHeight * cells.rows.length) + AXIS;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = FONT;
    this.drawCells(context, cells);
    this.drawMarks(context, cells);
    this.drawLabels(context, cells);
    if (this.cursor >= 0 && document.activeElement === canvas) this.drawCursor(context, cells);
  }

  private drawCells(context: CanvasRenderingContext2D, cells: HeatCells): void {
    const ramp = new Ramp(this.theme);
    const [low, high] = cells.range;
    const gap = this.cellWidth > 8 && this.cellHeight > 8 ? 1 : 0;
    const inside = this.cellWidth >= 52 && this.cellHeight >= 15;
    context.textAlign = "center";
    context.textBaseline = "middle";
    cells.values.forEach((value, cell) => {
      const { x, y } = this.placeOf(cell, cells);
      const share = value === null ? 0 : (value - low) / (high - low);
      const strength = cells.lowIsStrong ? 1 - share : share;
      context.fillStyle = value === null ? this.theme.of("row") : ramp.at(strength);
      // Without a gap cells overlap by half a pixel: seams between them would draw a pattern.
      context.fillRect(x, y, this.cellWidth - gap + (gap ? 0 : 0.5), this.cellHeight - gap + (gap ? 0 : 0.5));
      if (value === null || !inside) return;
      context.fillStyle = ramp.textAt(strength);
      context.fillText(cells.format(value), x + this.cellWidth / 2, y + this.cellHeight / 2, this.cellWidth - 4);
    });
  }

  /** Outlines marked cells, those next to one another in a row together. */
  private drawMarks(context: CanvasRenderingContext2D, cells: HeatCells): void {
    const across = cells.columns.length;
    context.strokeStyle = this.theme.of("straggler");
    context.lineWidth = 2;
    for (let cell = 0; cell < cells.values.length; cell++) {
      if (!cells.isMarked?.(cell)) continue;
      const first = cell;
      while ((cell + 1) % across !== 0 && cells.isMarked(cell + 1)) cell++;
      const { x, y } = this.placeOf(first, cells);
      context.strokeRect(x, y, this.cellWidth * (cell + 1 - first), Math.max(this.cellHeight - 1, 2));
    }
  }

  private drawLabels(context: CanvasRenderingContext2D, cells: HeatCells): void {
    context.fillStyle = this.theme.of("muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    const everyRow = Math.ceil(12 / this.cellHeight);
    for (let row = 0; row < cells.rows.length; row += everyRow) {
      context.fillText(
        cells.rows[row]!,
        this.gutter - GAP / 2,
        Math.max((row + 0.5) * this.cellHeight, 6),
        this.gutter - GAP,
      );
    }
    context.textAlign = "center";
    const widest = Math.max(1, ...cells.columns.map((column) => context.measureText(column).width));
    const everyColumn = Math.ceil((widest + GAP) / this.cellWidth);
    const y = Math.ceil(this.cellHeight * cells.rows.length) + AXIS / 2;
    for (let column = 0; column < cells.columns.length; column += everyColumn) {
      const half = context.measureText(cells.columns[column]!).width / 2;
      const x = this.gutter + (column + 0.5) * this.cellWidth;
      context.fillText(cells.columns[column]!, Math.min(Math.max(x, half), this.node.clientWidth - half), y);
    }
  }

  private drawCursor(context: CanvasRenderingContext2D, cells: HeatCells): void {
    const { x, y } = this.placeOf(this.cursor, cells);
    context.strokeStyle = this.theme.of("accent");
    context.lineWidth = 2;
    context.strokeRect(x, y, Math.max(this.cellWidth, 4), Math.max(this.cellHeight, 4));
  }

  private placeOf(cell: number, cells: HeatCells): { x: number; y: number } {
    const across = cells.columns.length;
    return { x: this.gutter + (cell % across) * this.cellWidth, y: rowOf(cell, across) * this.cellHeight };
  }
}

function rowOf(cell: number, across: number): number {
  return Math.floor(cell / across);
}

/** The colours of a heat map with the values at their ends. */
export function heatLegend(cells: HeatCells): HTMLElement[] {
  const [low, high] = cells.range;
  const ends = cells.lowIsStrong ? [high, low] : [low, high];
  const highest = Math.max(...cells.values.map((value) => value ?? -Infinity));
  const lowest = Math.min(...cells.values.map((value) => value ?? Infinity));
  const beyond = cells.lowIsStrong ? (lowest < low ? "≤ " : "") : highest > high ? "≥ " : "";
  const entry = element("span");
  entry.append(cells.format(ends[0]!), element("i", "", "heat-ramp"), `${beyond}${cells.format(ends[1]!)}`);
  if (!cells.values.includes(null)) return [entry];
  const unknown = element("span");
  const mark = element("i", "", "swatch");
  mark.style.setProperty("--colour", "var(--row)");
  unknown.append(mark, "nothing is known");
  return [entry, unknown];
}
