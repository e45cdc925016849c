// Stacked bars of parts of a whole, and the squares of their legends.

import { element } from "./dom";
import { formatPercent } from "./format";

export interface Part {
  name: string;
  ns: number;
  colour: string;
  hatched?: boolean;
}

export function swatch(colour: string, label: string, hatched = false): HTMLElement {
  const item = element("span");
  const mark = element("i", "", hatched ? "swatch hatched" : "swatch");
  mark.style.setProperty("--colour", `var(--${colour})`);
  item.append(mark, label);
  return item;
}

/** A bar whose full width is `whole` ns. */
export function stackedBar(
  parts: readonly Part[],
  whole: number,
  title: (part: Part) => string = (part) => `${part.name}: ${formatPercent(part.ns / whole)}`,
): HTMLElement {
  return barOf(
    parts.map((part) => ({ ...part, size: part.ns, title: title(part) })),
    whole,
  );
}

export interface Piece {
  size: number;
  colour: string;
  title: string;
  hatched?: boolean;
}

/** A bar whose full width is `whole`, in the unit of its pieces. */
export function barOf(pieces: readonly Piece[], whole: number): HTMLElement {
  const stack = element("div", "", "stack");
  for (const { size, colour, title, hatched } of pieces) {
    if (size <= 0) continue;
    const piece = element("i", "", hatched ? "hatched" : "");
    piece.style.setProperty("--colour", `var(--${colour})`);
    piece.style.width = `${(100 * size) / whole}%`;
    piece.title = title;
    stack.append(piece);
  }
  return stack;
}
