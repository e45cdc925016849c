// The cells of a heat map: ranks by place or by step, and what is coloured.

import type { Columns } from "../data/columns";
import type { Finding, RankTimes } from "../data/types";
import { formatBandwidth, formatDuration } from "../format";

/** The resource `map.json`: what the rows of the table `map` are, rank by rank, and of each rank block by block. */
export interface MapOutline {
  ranks: number[];
  blocks: { first: number; last: number }[];
}

export interface Quantity {
  name: string;
  hint: string;
  above: readonly string[]; // columns that are added up, those with a minus subtracted
  below: string; // the column that their sum is divided by
  lowIsBad?: boolean;
  typical?: number; // the faintest colour, where it is known beforehand
  format(value: number): string;
}

export const QUANTITIES: readonly Quantity[] = [
  {
    name: "slowness",
    hint: "own work of a rank per step over the median of the ranks of its stage that no finding names: 1 is typical",
    above: ["work"],
    below: "typical_work",
    typical: 1,
    format: (value) => `${value.toFixed(3)} ×`,
  },
  perStep("compute", "the compute stream worked", ["compute"]),
  perStep("wait", "stalls before the last participant had arrived, of all roles; bubbles are apart", ["wait"]),
  perStep("exposed", "stalls on communication, waiting and transfer", ["wait", "transfer"]),
  perStep("bubble", "stalls on a pipeline neighbour that had not yet produced the data", ["bubble"]),
  perStep(
    "pauses",
    "nothing was computed and no communication waited for: input, garbage collection, checkpoints, gaps",
    ["wall", "-compute", "-wait", "-transfer", "-bubble"],
  ),
  perStep("step", "the whole step", ["wall"]),
  {
    name: "bandwidth",
    hint: "busbw of calls of at least 1 MiB that were matched on all members, after the last had arrived; receives, not sends",
    above: ["bus_bytes"],
    below: "bus_ns",
    lowIsBad: true,
    format: formatBandwidth,
  },
  {
    name: "clock offset",
    hint: "the clock of the rank's host beside the reference, before it was corrected; it counts from the start of the host",
    above: ["offset_ns"],
    below: "steps",
    format: formatDuration,
  },
  {
    name: "clock drift",
    hint: "how much faster than the reference the clock of the rank's host runs, before it was corrected",
    above: ["drift_ppm"],
    below: "steps",
    format: (value) => `${value.toFixed(2)} ppm`,
  },
];

function perStep(name: string, what: string, above: readonly string[]): Quantity {
  return { name, hint: `time per step in which ${what}`, above, below: "steps", format: formatDuration };
}

export interface Clock {
  offset_ns: number;
  drift_ppm: number;
}

/** One cell: the value of the rank that stands out most of those that are in it. */
export interface Cell {
  value: number;
  rank: number;
  ranks: number; // how many are in the cell
  block: number; // of steps; −1 for all
}

export interface Grid {
  rows: string[];
  columns: string[];
  cells: (Cell | null)[]; // row by row; null where nothing is known
}

/** The values of every rank in every block of steps. */
export class RankMap {
  private readonly place = new Map<number, number>();

  constructor(
    readonly outline: MapOutline,
    private readonly columns: Columns,
    private readonly ranks: ReadonlyMap<number, RankTimes>,
    private readonly clocks: ReadonlyMap<string, Clock>, // by host
  ) {
    outline.ranks.forEach((rank, index) => {
      this.place.set(rank, index);
    });
  }

  /** The value of a rank in the blocks from `first` to before `end`; null if it is not known. */
  value(quantity: Quantity, rank: number, first = 0, end = this.outline.blocks.length): number | null {
    const base = this.place.get(rank)! * this.outline.blocks.length;
    const steps = this.columns.of("steps");
    let [above, below] = [0, 0];
    for (let row = base + first; row < base + end; row++) {
      const count = steps[row]!;
      const divisor = quantity.below === "steps" ? 1 : this.columns.of(quantity.below)[row]!;
      if (!count || divisor < 0) continue;
      for (const name of quantity.above) above += count * this.amount(name, row, rank);
      below += count * divisor;
    }
    return below > 0 ? above / below : null;
  }

  private amount(name: string, row: number, rank: number): number {
    if (name.startsWith("-")) return -this.amount(name.slice(1), row, rank);
    if (!isOfClock(name)) return this.columns.of(name)[row]!;
    return this.clocks.get(this.ranks.get(rank)?.host ?? "")?.[name] ?? 0;
  }

  isKnown(quantity: Quantity): boolean {
    if (quantity.above.some(isOfClock)) return this.clocks.size > 1;
    return this.outline.ranks.some((rank) => this.value(quantity, rank) !== null);
  }

  /** What rows and columns can be: ranks, hosts, and each dimension in which there are several places. */
  dimensions(): string[] {
    const known = new Map<string, Set<number | string>>();
    for (const { coordinates, host } of this.ranks.values()) {
      for (const [name, place] of [...Object.entries(coordinates), ["host", host] as const]) {
        known.set(name, (known.get(name) ?? new Set()).add(place));
      }
    }
    return ["rank", ...[...known].flatMap(([name, places]) => (places.size > 1 ? [name] : []))];
  }

  /** Cells by one dimension and another, or by `step`. */
  grid(quantity: Quantity, rowsBy: string, columnsBy: string): Grid {
    const rows = this.groups(rowsBy);
    if (columnsBy === "step") {
      const { blocks } = this.outline;
      const cells = [...rows.values()].flatMap((ranks) =>
        blocks.map((_, block) => this.cell(quantity, ranks, block, block + 1)),
      );
      return { rows: [...rows.keys()], columns: blocks.map(blockName), cells };
    }
    const columns = this.groups(columnsBy);
    const cells = [...rows.values()].flatMap((ranks) =>
      [...columns.values()].map((others) => {
        const among = new Set(others);
        return this.cell(
          quantity,
          ranks.filter((rank) => among.has(rank)),
        );
      }),
    );
    return { rows: [...rows.keys()], columns: [...columns.keys()], cells };
  }

  private groups(by: string): Map<string, number[]> {
    const groups = new Map<string, number[]>();
    for (const rank of this.outline.ranks) {
      const known = this.ranks.get(rank);
      const place = by === "rank" ? rank : by === "host" ? known?.host : known?.coordinates[by];
      const name = by === "host" ? String(place) : `${by} ${place ?? "–"}`;
      const members = groups.get(name);
      if (members) members.push(rank);
      else groups.set(name, [rank]);
    }
    const collator = new Intl.Collator("en", { numeric: true });
    return new Map([...groups].sort(([a], [b]) => collator.compare(a, b)));
  }

  private cell(quantity: Quantity, ranks: readonly number[], first?: number, end?: number): Cell | null {
    let found: Cell | null = null;
    for (const rank of ranks) {
      const value = this.value(quantity, rank, first, end);
      if (value !== null) found = worse(quantity, found, { value, rank, ranks: ranks.length, block: first ?? -1 });
    }
    return found;
  }
}

function isOfClock(name: string): name is keyof Clock {
  return name === "offset_ns" || name === "drift_ppm";
}

function worse(quantity: Quantity, one: Cell | null, other: Cell | null): Cell | null {
  if (!one || !other) return one ?? other;
  return (quantity.lowIsBad ? other.value < one.value : other.value > one.value) ? other : one;
}

export function blockName({ first, last }: { first: number; last: number }): string {
  return first === last ? `step ${first}` : `steps ${first}–${last}`;
}

/** What of a heat map shows a finding best: the quantity, and whether it differs between steps. */
export function viewOfFinding(finding: Pick<Finding, "cause" | "place" | "occurrence" | "stretches">): {
  quantity: string;
  overSteps: boolean;
} {
  const overSteps = finding.occurrence !== null || finding.stretches.length > 0;
  const { cause, place } = finding;
  if (cause === "communication" || place === "link" || place === "network") return { quantity: "bandwidth", overSteps };
  return { quantity: PAUSES.has(cause) ? "pauses" : "slowness", overSteps };
}

const PAUSES = new Set(["data", "gc", "checkpoint", "evaluation", "late_launch", "unknown"]);

/** The same with at most so many rows and columns: neighbours become one cell, which shows the one that stands out. */
export function bounded(grid: Grid, quantity: Quantity, mostRows: number, mostColumns: number): Grid {
  const down = Math.ceil(grid.rows.length / mostRows);
  const across = Math.ceil(grid.columns.length / mostColumns);
  if (down <= 1 && across <= 1) return grid;
  const [rows, columns] = [named(grid.rows, down), named(grid.columns, across)];
  const cells: (Cell | null)[] = new Array(rows.length * columns.length).fill(null);
  grid.cells.forEach((cell, index) => {
    const row = Math.floor(Math.floor(index / grid.columns.length) / down);
    const at = row * columns.length + Math.floor((index % grid.columns.length) / across);
    const before = cells[at] ?? null;
    const both = worse(quantity, before, cell);
    cells[at] = both && before && cell ? { ...both, ranks: before.ranks + cell.ranks } : both;
  });
  return { rows, columns, cells };
}

function named(names: readonly string[], together: number): string[] {
  if (together <= 1) return [...names];
  return Array.from({ length: Math.ceil(names.length / together) }, (_, index) => {
    const own = names.slice(index * together, (index + 1) * together);
    return own.length > 1 ? `${own[0]} to ${own.at(-1)}` : own[0]!;
  });
}

const LEAST_SPREAD = 0.05; // differences below this share are noise, which gets no strong colour
const FAR_OFF = 4;

/** The values of the faintest and the strongest colour. One cell far off does not hide the differences of all others. */
export function colourRange(cells: readonly (Cell | null)[], quantity: Quantity): [low: number, high: number] {
  const values = cells.flatMap((cell) => (cell ? [cell.value] : [])).sort((a, b) => a - b);
  if (!values.length) return [0, 1];
  const [lowest, highest] = [values[0]!, values.at(-1)!];
  if (quantity.typical !== undefined) return [quantity.typical, Math.max(highest, quantity.typical + LEAST_SPREAD)];
  if (quantity.lowIsBad) return [Math.min(lowest, highest * (1 - LEAST_SPREAD)), highest];
  const usual = values[Math.floor((values.length - 1) * 0.98)]!;
  const high = usual > lowest && highest - lowest > FAR_OFF * (usual - lowest) ? usual : highest;
  return [lowest, Math.max(high, lowest + Math.max(Math.abs(lowest) * LEAST_SPREAD, 1))];
}

export function ranksText(cell: Cell): string {
  return cell.ranks > 1 ? `rank ${cell.rank}, of ${cell.ranks} in this cell` : `rank ${cell.rank}`;
}
