import { Field, Int8, Int32, makeData, RecordBatch, Schema, Struct, Table, tableToIPC } from "apache-arrow";
import { describe, expect, it } from "vitest";
import { Columns, decodeColumns } from "./columns";

function encoded(): Uint8Array {
  const schema = new Schema([
    new Field("rank", new Int8()),
    new Field("start", new Int32(), false, new Map([["encoding", "delta"]])),
  ]);
  const children = [
    makeData({ type: new Int8(), data: Int8Array.of(0, 2, 2) }),
    makeData({ type: new Int32(), data: Int32Array.of(5, 10, -12) }),
  ];
  return tableToIPC(
    new Table(new RecordBatch(schema, makeData({ type: new Struct(schema.fields), length: 3, children }))),
    "stream",
  );
}

describe("columns", () => {
  it("adds up differences", () => {
    const columns = decodeColumns(encoded());
    expect([...columns.of("start")]).toEqual([5, 15, 3]);
  });

  it("are parted by rank", () => {
    const parts = [...decodeColumns(encoded()).byRank()].map(([rank, rows]) => [
      rank,
      rows.length,
      [...rows.of("start")],
    ]);
    expect(parts).toEqual([
      [0, 1, [5]],
      [2, 2, [15, 3]],
    ]);
  });

  it("without rows have every name", () => {
    expect(new Columns(0, new Map()).of("start").length).toBe(0);
  });

  it("says so when a column is missing", () => {
    expect(() => decodeColumns(encoded()).of("end")).toThrow("no column end");
  });
});
