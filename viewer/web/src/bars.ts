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
  const stack = element("div", "", "stack");
  for (const part of parts) {
    if (part.ns <= 0) continue;
    const piece = element("i", "", part.hatched ? "hatched" : "");
    piece.style.setProperty("--colour", `var(--${part.colour})`);
    piece.style.width = `${(100 * part.ns) / whole}%`;
    piece.title = title(part);
    stack.append(piece);
  }
  return stack;
}
