// The critical path of a step: adjoining pieces of work, transfers and waits that its length consists of.

import type { Columns } from "../data/columns";
import type { Outline } from "../data/types";
import type { Theme } from "../theme";
import { HEADING, type Layout, MAIN, RULER } from "./layout";
import type { Overlay } from "./overlay";
import type { Scene } from "./painter";

export interface Piece {
  rank: number; // index in the outline
  start: number;
  end: number;
  kind: string;
  role: string; // of a transfer, or of what was waited for; else empty
  uncertain: boolean;
}

export interface Share {
  rank: number; // index in the outline; −1 for transfers, which belong to no rank
  kind: string;
  role: string;
  ns: number;
  uncertain: number;
  longest: Piece;
}

interface Place {
  y: number; // on the canvas
  height: number;
}

export class CriticalPath implements Overlay {
  readonly pieces: readonly Piece[];

  constructor(columns: Columns, kinds: readonly string[], outline: Pick<Outline, "roles">) {
    const [rank, start, duration, kind, role, uncertain] = [
      "rank",
      "start",
      "duration",
      "kind",
      "role",
      "uncertain",
    ].map((name) => columns.of(name));
    this.pieces = Array.from({ length: columns.length }, (_, row) => ({
      rank: rank![row]!,
      start: start![row]!,
      end: start![row]! + duration![row]!,
      kind: kinds[kind![row]!] ?? "",
      role: outline.roles[role![row]!] ?? "",
      uncertain: uncertain![row] === 1,
    }));
  }

  get length(): number {
    return this.pieces.reduce((sum, { start, end }) => sum + end - start, 0);
  }

  /** The path by rank and kind, the longest first. */
  shares(): Share[] {
    const found = new Map<string, Share>();
    for (const piece of this.pieces) {
      const { kind, role } = piece;
      const rank = kind === "transfer" ? -1 : piece.rank;
      const key = `${rank}/${kind}/${role}`;
      const share = found.get(key) ?? { rank, kind, role, ns: 0, uncertain: 0, longest: piece };
      const ns = piece.end - piece.start;
      share.ns += ns;
      if (piece.uncertain) share.uncertain += ns;
      if (ns > share.longest.end - share.longest.start) share.longest = piece;
      found.set(key, share);
    }
    return [...found.values()].sort((a, b) => b.ns - a.ns);
  }

  /** Dims all but the pieces, outlines them, and joins those of different ranks. */
  draw(c: CanvasRenderingContext2D, scene: Scene, theme: Theme): void {
    const { viewport, layout, scroll } = scene;
    const { width, height } = c.canvas;
    const placeOf = placesOf(layout, scroll);
    const drawn = this.pieces.flatMap((piece) => {
      const place = placeOf.get(piece.rank);
      if (!place || piece.end < viewport.from || piece.start > viewport.to) return [];
      const x = viewport.x(piece.start);
      return [{ piece, place, x, width: Math.max(viewport.x(piece.end) - x, 1) }];
    });
    c.beginPath();
    c.rect(0, 0, width, height);
    for (const { place, x, width } of drawn) c.rect(x, place.y, width, place.height);
    c.globalAlpha = 0.6;
    c.fillStyle = theme.of("surface");
    c.fill("evenodd");
    c.globalAlpha = 1;
    c.strokeStyle = c.fillStyle = theme.of("critical");
    c.globalAlpha = 0.3;
    for (const { place, x, width } of drawn) if (place.height < MAIN) c.fillRect(x, place.y, width, place.height);
    c.globalAlpha = 1;
    c.lineWidth = 2;
    for (const { piece, place, x, width } of drawn) {
      c.setLineDash(piece.uncertain ? [3, 3] : []);
      c.beginPath(); // above and below: lines between adjoining pieces would hide the narrow ones
      for (const y of [place.y, place.y + place.height]) {
        c.moveTo(x, y);
        c.lineTo(x + width, y);
      }
      c.stroke();
    }
    c.setLineDash([]);
    c.beginPath();
    for (const [index, piece] of this.pieces.entries()) {
      const next = this.pieces[index + 1];
      const [from, to] = [placeOf.get(piece.rank), placeOf.get(next?.rank ?? -1)];
      if (!next || next.rank === piece.rank || !from || !to) continue;
      const x = viewport.x(piece.end);
      const [upper, lower] = from.y < to.y ? [from, to] : [to, from];
      c.moveTo(x, upper.y);
      c.lineTo(x, lower.y + lower.height);
    }
    c.stroke();
  }
}

/** Where each rank is on the canvas; one that is not shown is in the heading of its group. */
function placesOf(layout: Layout, scroll: number): Map<number, Place> {
  const places = new Map<number, Place>();
  for (const row of layout.rows) {
    const y = RULER + row.y - scroll;
    if (row.type === "group") {
      for (const rank of row.ranks) if (!places.has(rank)) places.set(rank, { y: y + 6, height: HEADING - 12 });
    } else places.set(row.rank, { y, height: MAIN });
  }
  return places;
}
