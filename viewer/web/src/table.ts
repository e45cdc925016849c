// Tables that sort, filter and copy.

import { button, element } from "./dom";

export interface ColumnOf<Item> {
  heading: string;
  text(item: Item): string;
  /** What the column is sorted by; without it by its text. */
  order?(item: Item): number;
  isWords?: boolean; // aligned to the left, and may wrap
  isMinor?: boolean; // left out of a narrow page, until all columns are asked for
}

const MANY_ROWS = 12; // from here on a table has a filter

/** A table of items. A click on a heading sorts by it, and a second one in reverse. */
export function dataTable<Item>(
  columns: readonly ColumnOf<Item>[],
  items: readonly Item[],
  onClick?: (item: Item) => void,
): HTMLElement {
  const holder = element("div", "", "data-table");
  const table = element("table");
  const body = element("tbody");
  let shown = [...items];
  let sorted: { column: ColumnOf<Item>; descending: boolean } | null = null;
  let filter = "";

  const fill = () => {
    const kept = filter
      ? shown.filter((item) => columns.some((column) => column.text(item).toLowerCase().includes(filter)))
      : shown;
    body.replaceChildren(...kept.map((item) => rowOf(item)));
  };
  const rowOf = (item: Item) => {
    const row = element("tr");
    row.append(...columns.map((column) => element("td", column.text(item), classesOf(column))));
    if (onClick) {
      row.className = "clickable";
      row.tabIndex = 0;
      row.addEventListener("click", () => onClick(item));
      row.addEventListener("keydown", (event) => event.key === "Enter" && onClick(item));
    }
    return row;
  };
  const sort = (column: ColumnOf<Item>) => {
    const descending: boolean = sorted?.column === column ? !sorted.descending : Boolean(column.order);
    sorted = { column, descending };
    const ascending = column.order
      ? (a: Item, b: Item) => column.order!(a) - column.order!(b)
      : (a: Item, b: Item) => column.text(a).localeCompare(column.text(b), "en", { numeric: true });
    shown = [...items].sort((a, b) => (descending ? -ascending(a, b) : ascending(a, b)));
    headings.forEach((heading, index) => {
      heading.ariaSort = columns[index] === column ? (descending ? "descending" : "ascending") : "none";
    });
    fill();
  };
  const headings = columns.map((column) => {
    const heading = element("th", "", classesOf(column));
    heading.scope = "col";
    heading.append(button(column.heading, `Sort by ${column.heading}`, () => sort(column)));
    return heading;
  });
  const head = element("thead");
  const line = element("tr");
  line.append(...headings);
  head.append(line);
  table.append(head, body);
  const scroll = element("div", "", "scroll");
  scroll.append(table);
  const bar = element("div", "", "table-bar");
  if (items.length >= MANY_ROWS) {
    const input = element("input");
    input.type = "search";
    input.placeholder = "Filter";
    input.ariaLabel = "Filter the rows of this table";
    input.addEventListener("input", () => {
      filter = input.value.trim().toLowerCase();
      fill();
    });
    bar.append(input);
  }
  bar.append(copyButton(() => csv(columns, shown)));
  if (columns.some(({ isMinor }) => isMinor)) bar.append(allColumns(holder));
  fill();
  holder.append(scroll, bar);
  return holder;
}

export function csv<Item>(columns: readonly ColumnOf<Item>[], items: readonly Item[]): string {
  const quoted = (text: string) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [
    columns.map(({ heading }) => heading),
    ...items.map((item) => columns.map((column) => column.text(item))),
  ];
  return lines.map((cells) => cells.map(quoted).join(",")).join("\n");
}

function classesOf<Item>({ isWords, isMinor }: ColumnOf<Item>): string {
  return [isWords ? "word" : "", isMinor ? "minor" : ""].filter(Boolean).join(" ");
}

/** A button that a narrow page has. */
function allColumns(holder: HTMLElement): HTMLButtonElement {
  const node = button("All columns", "Show the columns that a narrow page leaves out", () => {
    node.ariaPressed = String(holder.classList.toggle("wide"));
  });
  node.className = "quiet more-columns";
  node.ariaPressed = "false";
  return node;
}

function copyButton(text: () => string): HTMLButtonElement {
  const node = button("Copy as CSV", "Copy the rows of this table as comma-separated values", () => {
    copy(text()).then(
      () => flash("Copied"),
      () => flash("This browser does not allow copying"),
    );
  });
  const flash = (label: string) => {
    node.textContent = label;
    setTimeout(() => {
      node.textContent = "Copy as CSV";
    }, 1500);
  };
  node.className = "quiet";
  return node;
}

// Pages from a file are no secure context in every browser: there the old way is the only one.
async function copy(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("copying was refused");
}
