import { tableFromIPC } from "apache-arrow";

export type Column = Float64Array | Int32Array | Int16Array | Int8Array;

const NO_ROWS = new Int8Array();

/** A table of integer columns. */
export class Columns {
  constructor(
    readonly length: number,
    private readonly columns: ReadonlyMap<string, Column>,
  ) {}

  get names(): string[] {
    return [...this.columns.keys()];
  }

  has(name: string): boolean {
    return this.columns.has(name);
  }

  /** Throws where the table has no such column: the data and the page are of different versions. */
  of(name: string): Column {
    if (!this.length) return NO_ROWS; // a table of no ranks has no columns either
    const column = this.columns.get(name);
    if (!column) throw new Error(`the data has no column ${name}; the page and the data are of different versions`);
    return column;
  }

  /** The rows of each rank, which are consecutive, without copying them. */
  byRank(): Map<number, Columns> {
    const parts = new Map<number, Columns>();
    if (!this.length) return parts;
    const rank = this.of("rank");
    for (let first = 0; first < this.length; ) {
      let end = first + 1;
      while (end < this.length && rank[end] === rank[first]) end++;
      const columns = [...this.columns].map(([name, column]) => [name, column.subarray(first, end) as Column] as const);
      parts.set(rank[first]!, new Columns(end - first, new Map(columns)));
      first = end;
    }
    return parts;
  }
}

/** Reads an Arrow stream of integer columns. A column with the metadata `encoding: delta` holds differences of neighbours. */
export function decodeColumns(bytes: Uint8Array): Columns {
  const table = tableFromIPC(bytes);
  const columns = new Map<string, Column>();
  for (const field of table.schema.fields) {
    const values = plain(table.getChild(field.name)?.toArray());
    columns.set(field.name, field.metadata.get("encoding") === "delta" ? summed(values) : values);
  }
  return new Columns(table.numRows, columns);
}

// Nanoseconds within a step are far below 2^53, so doubles hold them exactly.
function plain(values: unknown): Column {
  if (values instanceof BigInt64Array) return Float64Array.from(values, Number);
  if (values instanceof Int32Array || values instanceof Int16Array || values instanceof Int8Array) return values;
  throw new Error("the data has a column that is not of integers");
}

function summed(differences: Column): Float64Array {
  const values = new Float64Array(differences.length);
  let value = 0;
  for (let row = 0; row < differences.length; row++) values[row] = value += differences[row]!;
  return values;
}
