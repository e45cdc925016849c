// Text is always set as text: names come from users and are never read as HTML.

export function element<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  text = "",
  className = "",
): HTMLElementTagNameMap[Tag] {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

export function byId<Kind extends HTMLElement = HTMLElement>(id: string): Kind {
  const node = document.getElementById(id);
  if (!node) throw new Error(`the page has no element ${id}`);
  return node as Kind;
}

export function button(label: string, title: string, onClick: () => void): HTMLButtonElement {
  const node = element("button", label);
  node.type = "button";
  node.title = title;
  node.addEventListener("click", onClick);
  return node;
}
