import { element } from "./dom";

/** A choice among values, with its label. */
export function labelledSelect(
  id: string,
  name: string,
  values: readonly string[],
): { label: HTMLElement; node: HTMLSelectElement } {
  const label = element("label", `${name} `);
  const node = element("select");
  node.id = id;
  node.append(...values.map((value) => element("option", value)));
  label.append(node);
  return { label, node };
}
