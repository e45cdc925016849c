// Draws a step: a row per rank, boxes from the columns of a step. Boxes narrower than a pixel are drawn once per pixel.

import { formatDuration, joined, niceTick } from "../format";
import { MICROBATCH_COLOURS, type Theme } from "../theme";
import { isWeightGradient, kindOf, nameOf, residualOf } from "./facts";
import { GAP, GUTTER, HEADING, LANE, type LaneRow, type Layout, MAIN, type RankRow, RULER } from "./layout";
import type { Overlay } from "./overlay";
import { type Box, type BoxTable, BUBBLE, type Step, sameBox } from "./step";
import type { Viewport } from "./viewport";

export type ColourBy = "kind" | "microbatch";

export interface DrawnBox extends Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface TimeRange {
  from: number;
  to: number;
}

/** What is drawn besides the boxes. */
export interface Scene {
  step: Step;
  layout: Layout;
  viewport: Viewport;
  scroll: number;
  title: string;
  named: ReadonlySet<number>; // numbers of ranks
  marked: ReadonlySet<number>;
  colourBy: ColourBy;
  hovered: Box | null;
  pinned: Box | null;
  pointerX: number | null;
  selected: TimeRange | null;
  planned: Step | null; // drawn under the rows: the ideal schedule of their stage, or another run's step of their rank
  overlay: Overlay | null;
}

const LEFT_OUT = "not in this file, which would be too large: commtrace view";
const PLAN = 8; // height of the planned boxes under a row
const FIRST_LINE = 9; // of a rank's label, below the top of its row
const SECOND_LINE = 22;
const COARSE = 4; // at least this wide is a box that gets an outline
const LABEL_MARGIN = 6; // beside the text of a box
const FEWEST_LETTERS = 6; // of a text that is cut: "o…" tells nothing
const LABEL_MIDDLE = 9; // below the top of a box, above the stalls that are drawn over its lower part
const UNCERTAIN = 0.4; // opacity of a box that is shorter than the clocks agree

export class Painter {
  boxes: DrawnBox[] = [];
  private height = 0;

  constructor(
    private readonly context: CanvasRenderingContext2D,
    private readonly theme: Theme,
  ) {}

  draw(scene: Scene, width: number, height: number): void {
    const { context: c } = this;
    this.height = height;
    this.boxes = [];
    c.fillStyle = this.theme.of("surface");
    c.fillRect(0, 0, width, height);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (const row of scene.layout.rows) {
      const y = RULER + row.y - scene.scroll;
      if (y + row.height <= RULER || y >= height) continue;
      if (row.type === "rank") this.drawRank(scene, row, y, width);
      else this.drawHeading(row.label, row.open, y, width);
    }
    const { overlay } = scene;
    if (overlay) this.clipped(GUTTER, RULER, width - GUTTER, height - RULER, () => overlay.draw(c, scene, this.theme));
    this.drawSelected(scene, width);
    for (const box of [scene.pinned, scene.hovered]) if (box) this.drawParticipants(scene, box, width);
    this.drawRuler(scene, width);
  }

  private drawHeading(label: string, open: boolean, y: number, width: number): void {
    const { context: c } = this;
    this.clipped(0, RULER, width, this.height - RULER, () => {
      c.fillStyle = this.theme.of("line");
      c.fillRect(0, y, width, 1);
      c.fillStyle = this.theme.of("muted");
      c.fillText(`${open ? "▾" : "▸"} ${label}`, 2, y + HEADING / 2 + 1);
    });
  }

  private drawRank(scene: Scene, row: RankRow, y: number, width: number): void {
    const { context: c } = this;
    const { step, viewport } = scene;
    this.clipped(GUTTER, RULER, width - GUTTER, this.height - RULER, () => {
      if (scene.marked.has(step.outline.ranks[row.rank]!.rank)) {
        c.fillStyle = this.theme.of("straggler-soft");
        c.fillRect(GUTTER, y - GAP / 2, width - GUTTER, MAIN + GAP);
      }
      c.fillStyle = this.theme.of("row");
      const start = viewport.x(step.from[row.rank]!);
      c.fillRect(start, y, viewport.x(step.to[row.rank]!) - start, MAIN);
      const missing = step.isLeftOut(row.rank) ? LEFT_OUT : step.isRead(row.rank) ? "" : "…";
      if (missing) {
        c.fillStyle = this.theme.of("muted");
        c.fillText(missing, GUTTER + 8, y + MAIN / 2);
      }
      this.drawWork(scene, row.rank, y);
      this.drawStalls(scene, row.rank, y);
      this.drawHost(scene, row.rank, y);
      for (const lane of row.lanes) this.drawLane(scene, row.rank, lane, RULER + lane.y - scene.scroll);
      if (scene.planned) this.drawPlanned(scene, scene.planned, row.rank, y);
    });
    this.clipped(0, RULER, GUTTER, this.height - RULER, () => this.drawLabels(scene, row, y));
  }

  private drawLabels(scene: Scene, row: RankRow, y: number): void {
    const { context: c, theme } = this;
    const rank = scene.step.outline.ranks[row.rank]!;
    const indent = 8;
    const isNamed = scene.named.has(rank.rank);
    if (scene.marked.has(rank.rank)) {
      c.fillStyle = theme.of("straggler-soft");
      c.fillRect(0, y - GAP / 2, GUTTER, MAIN + GAP);
      c.fillStyle = theme.of("straggler");
      c.fillRect(0, y - GAP / 2, 4, MAIN + GAP);
    }
    c.fillStyle = theme.of("muted");
    c.fillText(row.lanes.length ? "▾" : "▸", indent, y + MAIN / 2);
    c.fillStyle = theme.of(isNamed ? "straggler" : "text");
    const label = `${isNamed ? "▲ " : ""}rank ${rank.rank} · ${rank.host}`;
    c.fillText(clip(c, label, GUTTER - indent - 20), indent + 14, y + FIRST_LINE);
    c.fillStyle = theme.of("muted");
    const place = joined([row.note, placeOf(rank)]);
    c.fillText(clip(c, place, GUTTER - indent - 20), indent + 14, y + SECOND_LINE);
    for (const lane of row.lanes) {
      const text = clip(c, rank.lanes[lane.lane]!.label, GUTTER - indent - 34);
      c.fillText(text, indent + 28, RULER + lane.y - scene.scroll + LANE / 2);
    }
  }

  private drawWork(scene: Scene, rank: number, y: number): void {
    const { step } = scene;
    const work = step.columns("work", rank);
    const depth = work.of("depth");
    this.eachVisible(scene, "work", rank, (box, x, width) => {
      const kind = kindOf(step, box);
      const inset = Math.min(depth[box.row]!, 4) * 4;
      const colour = this.workColour(scene, box, kind);
      const label = width < 12 ? "" : this.workLabel(scene, box, kind, width);
      this.fill(
        { ...box, x, y: y + inset, width, height: MAIN - inset },
        this.theme.of(colour),
        label,
        this.ink(colour),
      );
    });
  }

  private workColour(scene: Scene, box: Box, kind: string): string {
    const microbatch = scene.step.optional(box, "microbatch");
    if (scene.colourBy === "microbatch" && microbatch >= 0 && (kind === "forward" || kind === "backward")) {
      return `microbatch-${microbatch % MICROBATCH_COLOURS}${kind === "backward" ? "-soft" : ""}`;
    }
    const name = nameOf(scene.step, box);
    if (kind === "backward" && isWeightGradient(name)) return "backward-weight";
    if (scene.step.optional(box, "chunk") % 2 === 1 && this.theme.has(`${kind}-odd-chunk`)) return `${kind}-odd-chunk`;
    return this.theme.has(kind) ? kind : "span";
  }

  private ink(colour: string): string {
    return this.theme.of(this.theme.has(`on-${colour}`) ? `on-${colour}` : "text");
  }

  private workLabel(scene: Scene, box: Box, kind: string, width: number): string {
    const microbatch = scene.step.optional(box, "microbatch");
    if (microbatch < 0) return nameOf(scene.step, box) || kind;
    const chunk = scene.step.optional(box, "chunk");
    const number = chunk > 0 ? `${microbatch}·${chunk}` : `${microbatch}`;
    if (width > 90) return `${kind} ${number}`;
    return widthOf(this.context, number) <= width - LABEL_MARGIN ? number : `${microbatch}`;
  }

  private drawStalls(scene: Scene, rank: number, y: number): void {
    const { step } = scene;
    const stalls = step.columns("stalls", rank);
    const [depth, role] = [stalls.of("depth"), stalls.of("role")];
    this.eachVisible(scene, "stalls", rank, (box, x, width) => {
      const inset = depth[box.row]! > 0 ? MAIN * 0.55 : 0;
      const style = this.stallStyle(kindOf(step, box), step.outline.roles[role[box.row]!] ?? "");
      this.fill({ ...box, x, y: y + inset, width, height: MAIN - inset }, style);
    });
  }

  private stallStyle(state: string, role: string): string | CanvasPattern {
    if (state === BUBBLE) return this.theme.hatched("bubble", "bubble-soft");
    if (state === "wait") return this.theme.hatched(this.theme.role(role), "surface");
    return this.theme.of(this.theme.role(role));
  }

  private drawHost(scene: Scene, rank: number, y: number): void {
    this.eachVisible(scene, "host", rank, (box, x, width) => {
      const kind = kindOf(scene.step, box);
      const colour = this.theme.of(this.theme.has(kind) ? kind : "span");
      this.fill({ ...box, x, y: y + MAIN - 6, width, height: 6 }, colour);
    });
  }

  private drawLane(scene: Scene, rank: number, row: LaneRow, y: number): void {
    const { step, viewport } = scene;
    const communication = step.columns("communication", rank);
    const [lane, sublane, wait] = [communication.of("lane"), communication.of("sublane"), communication.of("wait")];
    const role = this.theme.role(step.outline.ranks[rank]!.lanes[row.lane]!.role);
    this.eachVisible(scene, "communication", rank, (box, x, width) => {
      if (lane[box.row] !== row.lane) return;
      const top = y + sublane[box.row]! * LANE + 1;
      this.fill({ ...box, x, y: top, width, height: LANE - 2 }, this.theme.of(role));
      const waited = Math.min(Math.max(wait[box.row]!, 0) / viewport.perPixel, width);
      if (waited < 1) return;
      this.context.fillStyle = this.theme.hatched(role, "surface");
      this.context.fillRect(x, top, waited, LANE - 2);
    });
  }

  private drawPlanned(scene: Scene, planned: Step, rank: number, y: number): void {
    const own = scene.step.outline.ranks[rank]!;
    const index =
      planned.name === "plan"
        ? planned.outline.ranks.findIndex(({ coordinates }) => coordinates.pp === own.coordinates.pp)
        : planned.indexOf(own.rank);
    if (index < 0) return;
    const work = planned.columns("work", index);
    if (!work.length) return;
    const [start, duration] = [work.of("start"), work.of("duration")];
    const { context: c } = this;
    c.fillStyle = this.theme.of("surface");
    c.fillRect(GUTTER, y + MAIN - PLAN - 1, scene.viewport.width - GUTTER, PLAN + 1);
    for (let row = 0; row < work.length; row++) {
      const x = scene.viewport.x(start[row]!);
      const width = scene.viewport.x(start[row]! + duration[row]!) - x;
      c.fillStyle = this.theme.of(kindOf(planned, { table: "work", rank: index, row }));
      c.fillRect(x, y + MAIN - PLAN, Math.max(width - 0.5, 0.5), PLAN);
    }
  }

  private eachVisible(
    scene: Scene,
    table: BoxTable,
    rank: number,
    draw: (box: Box, x: number, width: number) => void,
  ): void {
    const { step, viewport } = scene;
    const columns = step.columns(table, rank);
    if (!columns.length) return;
    const [start, duration] = [columns.of("start"), columns.of("duration")];
    const layer = layers(
      columns.has("lane") ? columns.of("lane") : null,
      columns.has("sublane") ? columns.of("sublane") : null,
      table === "work" ? columns.of("kind") : table === "stalls" ? columns.of("state") : null,
    );
    const residual = residualOf(step);
    const lastPixel = new Map<number, number>();
    for (let row = 0; row < columns.length; row++) {
      const begin = start[row]!;
      if (begin > viewport.to) break;
      const finish = begin + duration[row]!;
      if (finish < viewport.from) continue;
      const left = Math.max(viewport.x(begin), GUTTER - 2);
      const width = Math.min(viewport.x(finish), viewport.width + 2) - left;
      if (width < 1) {
        const key = layer(row);
        const pixel = Math.floor(left);
        if (lastPixel.get(key) === pixel) continue;
        lastPixel.set(key, pixel);
      }
      const isUncertain = duration[row]! < residual;
      if (isUncertain) this.context.globalAlpha = UNCERTAIN;
      draw({ table, rank, row }, left, Math.max(width, 1));
      if (isUncertain) this.context.globalAlpha = 1;
    }
  }

  private fill(box: DrawnBox, style: string | CanvasPattern, label = "", ink = ""): void {
    const { context: c } = this;
    this.boxes.push(box);
    c.fillStyle = style;
    c.fillRect(box.x, box.y, box.width, box.height);
    if (box.width > COARSE) {
      c.strokeStyle = this.theme.of("surface");
      c.lineWidth = 1;
      c.strokeRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1);
    }
    if (!label || box.height <= 12) return;
    const text = clip(c, label, box.width - LABEL_MARGIN);
    c.fillStyle = ink;
    if (text.length > FEWEST_LETTERS || text === label)
      c.fillText(text, Math.max(box.x, GUTTER) + 4, box.y + Math.min(LABEL_MIDDLE, box.height / 2) + 0.5);
  }

  /** Outlines a box and its communication on every shown rank, with arrows from its sender, or from the last to come. */
  private drawParticipants(scene: Scene, box: Box, width: number): void {
    const { context: c, theme } = this;
    this.clipped(GUTTER, RULER, width - GUTTER, this.height - RULER, () => {
      c.strokeStyle = theme.of("text");
      c.fillStyle = theme.of("text");
      c.lineWidth = 1.5;
      const own = this.boxes.find((candidate) => sameBox(candidate, box));
      if (own) c.strokeRect(own.x, own.y, own.width, own.height);
      const communication = scene.step.communicationOf(box);
      if (!communication) return;
      const members = scene.step.participants(communication);
      const sender = members.find((member) => nameOf(scene.step, member) === "send");
      const source = sender ?? scene.step.lastToCome(members);
      const ends = this.placesOf(scene, members);
      for (const end of ends) c.strokeRect(end.x, end.y, Math.max(end.width, 2), end.height);
      const from = ends.find((end) => end.box === source);
      if (!from) return; // not known, or not among the ranks that are shown
      for (const end of ends) if (end !== from) this.drawArrow(from, end, sender !== undefined);
    });
  }

  private drawArrow(from: Place, to: Place, sends: boolean): void {
    const { context: c } = this;
    const [x1, y1] = [from.x + (sends ? 0 : Math.min(2, from.width)), from.y + from.height / 2];
    const [x2, y2] = [
      sends ? to.x + to.width : Math.min(Math.max(from.x, to.x), to.x + to.width),
      to.y + to.height / 2,
    ];
    c.setLineDash([4, 3]);
    c.beginPath();
    c.moveTo(x1, y1);
    c.lineTo(x2, y2);
    c.stroke();
    c.setLineDash([]);
    const angle = Math.atan2(y2 - y1, x2 - x1);
    c.beginPath();
    c.moveTo(x2, y2);
    for (const turn of [2.7, -2.7]) c.lineTo(x2 + 7 * Math.cos(angle + turn), y2 + 7 * Math.sin(angle + turn));
    c.fill();
  }

  private placesOf(scene: Scene, communications: readonly Box[]): Place[] {
    const { step, viewport, layout } = scene;
    const rowOf = new Map(layout.rows.flatMap((row) => (row.type === "rank" ? [[row.rank, row] as const] : [])));
    return communications.flatMap((box) => {
      const row = rowOf.get(box.rank);
      if (!row) return [];
      const lane = row.lanes.find((candidate) => candidate.lane === step.value(box, "lane"));
      const y = lane ? lane.y + step.value(box, "sublane") * LANE + 1 : row.y + MAIN - 5;
      const x = viewport.x(step.start(box));
      const width = viewport.x(step.end(box)) - x;
      return [{ x, y: RULER + y - scene.scroll, width, height: lane ? LANE - 2 : 4, box }];
    });
  }

  private drawSelected({ selected, viewport }: Scene, width: number): void {
    if (!selected) return;
    const { context: c, theme } = this;
    const [x1, x2] = [Math.max(viewport.x(selected.from), GUTTER), Math.min(viewport.x(selected.to), width)];
    c.globalAlpha = 0.18;
    c.fillStyle = theme.of("accent");
    c.fillRect(x1, RULER, Math.max(x2 - x1, 1), this.height);
    c.globalAlpha = 1;
    const text = formatDuration(selected.to - selected.from);
    const textWidth = c.measureText(text).width;
    const left = Math.max(GUTTER, (x1 + x2 - textWidth) / 2);
    c.fillStyle = theme.of("surface");
    c.fillRect(left - 5, this.height - 21, textWidth + 10, 18);
    c.fillStyle = theme.of("accent");
    c.fillText(text, left, this.height - 11);
  }

  private drawRuler(scene: Scene, width: number): void {
    const { context: c, theme } = this;
    const { viewport } = scene;
    c.fillStyle = theme.of("surface");
    c.fillRect(0, 0, width, RULER);
    c.strokeStyle = theme.of("line");
    c.fillStyle = theme.of("muted");
    c.lineWidth = 1;
    c.beginPath();
    const tick = niceTick((viewport.to - viewport.from) / Math.max(2, (width - GUTTER) / 110));
    for (let time = Math.ceil(viewport.from / tick) * tick; time <= viewport.to; time += tick) {
      const x = Math.round(viewport.x(time)) + 0.5;
      c.moveTo(x, RULER - 5);
      c.lineTo(x, RULER);
      if (x < width - 50) c.fillText(time === 0 ? "0" : formatDuration(time), x + 3, 10);
    }
    c.moveTo(0, RULER - 0.5);
    c.lineTo(width, RULER - 0.5);
    c.stroke();
    c.fillText(clip(c, scene.title, GUTTER - 20), 8, 11);
    this.drawPointer(scene);
  }

  // The line at the pointer is as wide as the clocks' uncertainty: events inside it may have another order.
  private drawPointer({ pointerX, step, viewport }: Scene): void {
    if (pointerX === null || pointerX < GUTTER) return;
    const { context: c } = this;
    const width = Math.max((2 * (step.outline.residual_ns?.p99 ?? 0)) / viewport.perPixel, 1);
    c.globalAlpha = 0.25;
    c.fillStyle = this.theme.of("accent");
    c.fillRect(Math.max(GUTTER, pointerX - width / 2), RULER, width, this.height);
    c.globalAlpha = 1;
  }

  private clipped(x: number, y: number, width: number, height: number, draw: () => void): void {
    const { context: c } = this;
    c.save();
    c.beginPath();
    c.rect(x, y, width, height);
    c.clip();
    draw();
    c.restore();
  }
}

/** The part of a rank's label without its number and host: `pp2 dp1 tp1`. */
function placeOf({ label, host }: { label: string; host: string }): string {
  return joined(
    label
      .split(" · ")
      .slice(1)
      .filter((part) => part !== host),
  );
}

interface Place {
  x: number;
  y: number;
  width: number;
  height: number;
  box: Box;
}

type Codes = { readonly [row: number]: number } | null;

/** Equal for boxes that are drawn in the same place and colour: of one lane and sublane, and of one kind or state. */
function layers(lane: Codes, sublane: Codes, colour: Codes): (row: number) => number {
  return (row) => ((lane?.[row] ?? 0) * 256 + (sublane?.[row] ?? 0)) * 256 + (colour?.[row] ?? 0);
}

/** As much of a text as fits; nothing when not even one character and an ellipsis do. */
const WIDTHS = new Map<string, number>(); // of texts; to measure one takes as long as to draw it
const MOST_WIDTHS = 20_000;

function widthOf(context: CanvasRenderingContext2D, text: string): number {
  let width = WIDTHS.get(text);
  if (width === undefined) {
    if (WIDTHS.size >= MOST_WIDTHS) WIDTHS.clear();
    width = context.measureText(text).width;
    WIDTHS.set(text, width);
  }
  return width;
}

/** A text cut to a width, in the one font of the timeline. */
export function clip(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (widthOf(context, text) <= width) return text;
  for (let length = Math.min(text.length - 1, Math.floor(width / 4)); length > 0; length--) {
    const shorter = `${text.slice(0, length)}…`;
    if (widthOf(context, shorter) <= width) return shorter;
  }
  return "";
}
