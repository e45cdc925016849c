// The view in the address of the page, so that a link shows what its sender saw.

export interface View {
  view: string | null; // the one that is shown; null for the overview
  step: number | null;
  from: number | null;
  to: number | null;
  rows: string | null;
  colour: string | null;
}

export function readView(hash: string): View {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  const number = (name: string) => {
    const text = values.get(name);
    return text === null || !Number.isFinite(Number(text)) ? null : Number(text);
  };
  return {
    view: values.get("view"),
    step: number("step"),
    from: number("from"),
    to: number("to"),
    rows: values.get("rows"),
    colour: values.get("colour"),
  };
}

export function writeView(view: View): string {
  const values = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (value !== null) values.set(name, typeof value === "number" ? String(Math.round(value)) : value);
  }
  return `#${values}`;
}

let pending: number | undefined;

/** Puts what the timeline shows into the address a moment later: browsers refuse many changes in a second. */
export function keepTimeline(shown: () => Omit<View, "view">): void {
  clearTimeout(pending);
  pending = window.setTimeout(() => {
    const { view } = readView(location.hash);
    history.replaceState(null, "", writeView({ ...shown(), view }));
  }, 300);
}
