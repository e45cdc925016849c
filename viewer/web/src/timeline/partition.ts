// Where the time of a range of a step goes, over the ranks that are asked about.

import { kindOf, stallName } from "./facts";
import type { TimeRange } from "./painter";
import type { Box, Step } from "./step";

export interface Share {
  name: string; // "forward", "wait for dp", "in no span" …
  ns: number; // sum over the ranks
}

/** Divides the range on each rank into its stalls, the work and the pauses around them, and what is in no span. Sums are exact. */
export function partition(step: Step, range: TimeRange, ranks: readonly number[]): Share[] {
  const sums = new Map<string, number>();
  const add = (name: string, ns: number) => ns > 0 && sums.set(name, (sums.get(name) ?? 0) + ns);
  for (const rank of ranks) {
    if (!step.has(rank)) continue;
    const begin = Math.max(range.from, step.from[rank]!);
    const end = Math.min(range.to, step.to[rank]!);
    if (end <= begin) continue;
    const pieces = [
      ...stallPieces(step, rank, begin, end),
      ...workPieces(step, rank, begin, end),
      ...hostPieces(step, rank, begin, end),
    ];
    for (const [name, ns] of covered(pieces, begin, end)) add(name, ns);
  }
  return [...sums].map(([name, ns]) => ({ name, ns })).sort((a, b) => b.ns - a.ns);
}

interface Piece {
  from: number;
  to: number;
  level: number; // the highest one counts
  name: string;
}

export const IN_NO_SPAN = "in no span";

function stallPieces(step: Step, rank: number, begin: number, end: number): Piece[] {
  return pieces(step, { table: "stalls", rank, row: 0 }, begin, end, (box) => ({
    name: stallName(step, box),
    level: 1000,
  }));
}

function workPieces(step: Step, rank: number, begin: number, end: number): Piece[] {
  return pieces(step, { table: "work", rank, row: 0 }, begin, end, (box) => ({
    name: kindOf(step, box),
    level: 1 + Math.min(step.value(box, "depth"), 900),
  }));
}

function hostPieces(step: Step, rank: number, begin: number, end: number): Piece[] {
  return pieces(step, { table: "host", rank, row: 0 }, begin, end, (box) => ({ name: kindOf(step, box), level: 0 }));
}

function pieces(
  step: Step,
  of: Box,
  begin: number,
  end: number,
  describe: (box: Box) => { name: string; level: number },
): Piece[] {
  const columns = step.columns(of.table, of.rank);
  const [start, duration] = [columns.of("start"), columns.of("duration")];
  const found: Piece[] = [];
  for (let row = 0; row < columns.length && start[row]! < end; row++) {
    const [from, to] = [Math.max(start[row]!, begin), Math.min(start[row]! + duration[row]!, end)];
    if (to > from) found.push({ from, to, ...describe({ ...of, row }) });
  }
  return found;
}

/** Gives every instant to the piece of the highest level that holds it. */
function covered(pieces: readonly Piece[], begin: number, end: number): Map<string, number> {
  const cuts = [...new Set([begin, end, ...pieces.flatMap(({ from, to }) => [from, to])])].sort((a, b) => a - b);
  const byStart = [...pieces].sort((a, b) => a.from - b.from);
  const sums = new Map<string, number>();
  let open: Piece[] = [];
  let next = 0;
  for (let index = 0; index + 1 < cuts.length; index++) {
    const [from, to] = [cuts[index]!, cuts[index + 1]!];
    while (next < byStart.length && byStart[next]!.from <= from) open.push(byStart[next++]!);
    open = open.filter((piece) => piece.to > from);
    const top = open.reduce<Piece | null>((best, piece) => (best && best.level >= piece.level ? best : piece), null);
    const name = top?.name ?? IN_NO_SPAN;
    sums.set(name, (sums.get(name) ?? 0) + to - from);
  }
  return sums;
}
