// The views of the page, one of which is shown at a time. The address names it, and the browser's way back leads to the last.

import { byId, element } from "./dom";
import { readView, writeView } from "./link";

export const FIRST = "overview";

export class Views {
  private readonly nodes = new Map<string, HTMLElement>();
  private readonly links = new Map<string, HTMLButtonElement>();

  constructor() {
    for (const node of document.querySelectorAll<HTMLElement>(".view")) this.add(node.id.replace("view-", ""), node);
    byId("views").append(...this.links.values());
    window.addEventListener("popstate", () => this.showLinked());
    window.addEventListener("beforeprint", () => this.showAll(true));
    window.addEventListener("afterprint", () => this.showAll(false));
    this.showLinked();
  }

  /** Shows a view, by its name in the address. */
  show(name: string): void {
    if (this.nodes.get(name)?.hidden === false) return;
    history.pushState(null, "", writeView({ ...readView(location.hash), view: name === FIRST ? null : name }));
    this.apply(name);
    window.scrollTo(0, 0);
  }

  /** Whether a view has anything to show. */
  has(name: string): boolean {
    return this.links.get(name)?.hidden === false;
  }

  nameOf(name: string): string {
    return this.nodes.get(name)?.dataset.name ?? name;
  }

  private add(name: string, node: HTMLElement): void {
    const link = element("button", node.dataset.name ?? name, "link");
    link.type = "button";
    link.dataset.view = name;
    link.addEventListener("click", () => this.show(name));
    const sections = [...node.querySelectorAll("section")];
    const offer = () => {
      link.hidden = sections.every((section) => section.hidden);
    };
    const changes = new MutationObserver(offer);
    for (const section of sections) changes.observe(section, { attributeFilter: ["hidden"] });
    offer();
    this.nodes.set(name, node);
    this.links.set(name, link);
  }

  private showLinked(): void {
    const name = readView(location.hash).view ?? FIRST;
    this.apply(this.nodes.has(name) ? name : FIRST);
  }

  private apply(name: string): void {
    for (const [known, node] of this.nodes) {
      node.hidden = known !== name;
      this.links.get(known)!.ariaCurrent = known === name ? "page" : "false";
    }
    window.dispatchEvent(new Event("resize")); // what is drawn is as wide as its holder, which had no width
  }

  /** Paper has all views, one below the other. */
  private showAll(all: boolean): void {
    if (!all) this.showLinked();
    else for (const node of this.nodes.values()) node.hidden = false;
    window.dispatchEvent(new Event("resize"));
  }
}
