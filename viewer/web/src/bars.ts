// Stacked bars of parts of a whole, and the squares of their legends.

import { element } from "./dom";
import { formatDuration, formatPercent } from "./format";

const LEAST_SHOWN = 0.0005;
const LEAST_LABELLED = 0.05; // share of a bar that has room for a percentage

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
  ofNs = whole, // what percentages are of
): HTMLElement {
  const label = (ns: number) => `${Math.round((100 * ns) / ofNs)} %`;
  return barOf(
    parts.map((part) => ({ ...part, size: part.ns, title: title(part), label: label(part.ns) })),
    whole,
  );
}

/** The legend of a bar: its parts by size, with their shares and times; those too small to be seen are left out. */
export function partsLegend(parts: readonly Part[], whole: number): HTMLElement {
  const legend = element("div", "", "legend");
  const visible = parts.filter(({ ns }) => ns / whole >= LEAST_SHOWN).toSorted((a, b) => b.ns - a.ns);
  legend.append(
    ...visible.map(({ colour, name, ns, hatched }) =>
      swatch(colour, `${name} ${formatPercent(ns / whole)} (${formatDuration(ns)})`, hatched),
    ),
  );
  return legend;
}

export interface Piece {
  size: number;
  colour: string;
  title: string;
  hatched?: boolean;
  label?: string; // in the piece, where there is room
}

/** A bar whose full width is `whole`, in the unit of its pieces. */
export function barOf(pieces: readonly Piece[], whole: number): HTMLElement {
  const stack = element("div", "", "stack");
  for (const { size, colour, title, hatched, label } of pieces) {
    if (size <= 0) continue;
    const text = size / whole >= LEAST_LABELLED ? label : "";
    const piece = element("i", text, hatched ? "hatched" : "");
    piece.style.setProperty("--colour", `var(--${colour})`);
    piece.style.width = `${(100 * size) / whole}%`;
    piece.title = title;
    stack.append(piece);
  }
  return stack;
}
