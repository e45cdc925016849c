import { describe, expect, it } from "vitest";
import { type ColumnOf, csv, dataTable } from "./table";

interface Item {
  name: string;
  ns: number;
}

const COLUMNS: ColumnOf<Item>[] = [
  { heading: "name", text: ({ name }) => name, isWords: true },
  { heading: "time", text: ({ ns }) => `${ns} ns`, order: ({ ns }) => ns },
];
const ITEMS: Item[] = [
  { name: "rank 10", ns: 3 },
  { name: "rank 9", ns: 20 },
  { name: 'a "name", quoted', ns: 100 },
];

function names(table: HTMLElement): (string | null)[] {
  return [...table.querySelectorAll("tbody td:first-child")].map((cell) => cell.textContent);
}

describe("a table", () => {
  it("sorts numbers with the largest first, and words as people count", () => {
    const table = dataTable(COLUMNS, ITEMS);
    const [byName, byTime] = [...table.querySelectorAll<HTMLButtonElement>("th button")];
    byTime!.click();
    expect(names(table)).toEqual(['a "name", quoted', "rank 9", "rank 10"]);
    byTime!.click();
    expect(names(table)).toEqual(["rank 10", "rank 9", 'a "name", quoted']);
    byName!.click();
    expect(names(table)).toEqual(['a "name", quoted', "rank 9", "rank 10"]);
  });

  it("filters when it is long", () => {
    const many = Array.from({ length: 20 }, (_, index) => ({ name: `rank ${index}`, ns: index }));
    const table = dataTable(COLUMNS, many);
    const input = table.querySelector("input")!;
    input.value = "rank 1";
    input.dispatchEvent(new Event("input"));
    expect(names(table)).toHaveLength(11);
    expect(dataTable(COLUMNS, ITEMS).querySelector("input")).toBeNull();
  });

  it("never reads a name as HTML", () => {
    const table = dataTable(COLUMNS, [{ name: "<img src=x onerror=alert(1)>", ns: 0 }]);
    expect(table.querySelector("img")).toBeNull();
  });

  it("is copied as CSV", () => {
    expect(csv(COLUMNS, ITEMS.slice(2))).toBe('name,time\n"a ""name"", quoted",100 ns');
  });
});
