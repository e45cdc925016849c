import { tableFromIPC } from "apache-arrow";

export type Column = Float64Array | Int32Array | Int16Array | Int8Array;

/** A table of integer columns. Rows of one rank are consecutive, in the order of the column `rank`. */
export class Columns {
  constructor(
    readonly length: number,
    private readonly columns: ReadonlyMap<string, Column>,
  ) {}

  has(name: string): boolean {
    return this.columns.has(name);
  }

  /** Throws where the table has no such column: the data and the page are of different versions. */
  of(name: string): Column {
    const column = this.columns.get(name);
    if (!column) throw new Error(`the data has no column ${name}; the page and the data are of different versions`);
    return column;
  }

  /** First row of each of `ranks` ranks, and the end of the last one. */
  rankBegins(ranks: number): Int32Array {
    const rank = this.of("rank");
    const begins = new Int32Array(ranks + 1);
    for (let row = 0; row < this.length; row++) begins[rank[row]! + 1]!++;
    for (let index = 0; index < ranks; index++) begins[index + 1]! += begins[index]!;
    return begins;
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
