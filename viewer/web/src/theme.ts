// Light or dark, remembered; colours of the style sheet by name, and patterns made of them.

const KEY = "commtrace-theme";
const FAMILIES: Record<string, string> = {
  "dp-cp": "dp",
  "expert-dp": "dp",
  "expert-tp": "tp",
  "position-embedding": "embedding",
};
const ROLES = new Set(["tp", "pp", "dp", "cp", "ep", "embedding"]);

/** Number of colours for microbatches, `--microbatch-0` and so on; they repeat. */
export const MICROBATCH_COLOURS = 8;

export class Theme {
  private style = getComputedStyle(document.documentElement);
  private readonly colours = new Map<string, string>();
  private readonly patterns = new Map<string, CanvasPattern>();
  private readonly listeners: (() => void)[] = [];
  private readonly prefersDark = matchMedia("(prefers-color-scheme: dark)");

  constructor() {
    this.set(remembered() ?? this.preferred(), false);
    this.prefersDark.addEventListener("change", () => this.set(this.preferred(), false));
    this.printInLight();
  }

  get name(): string {
    return document.documentElement.dataset.theme ?? "light";
  }

  toggle(): void {
    this.set(this.name === "dark" ? "light" : "dark", true);
  }

  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  has(name: string): boolean {
    return this.of(name) !== "";
  }

  of(name: string): string {
    let colour = this.colours.get(name);
    if (colour === undefined) {
      colour = this.style.getPropertyValue(`--${name}`).trim();
      this.colours.set(name, colour);
    }
    return colour;
  }

  role(role: string): string {
    const name = FAMILIES[role] ?? role;
    return ROLES.has(name) ? name : "role";
  }

  hatched(ink: string, paper: string): CanvasPattern {
    const key = `${ink}/${paper}`;
    let pattern = this.patterns.get(key);
    if (!pattern) {
      pattern = hatch(this.of(ink), this.of(paper));
      this.patterns.set(key, pattern);
    }
    return pattern;
  }

  private preferred(): string {
    return this.prefersDark.matches ? "dark" : "light";
  }

  /** The style sheet makes paper light; what is drawn must be drawn again for it. */
  private printInLight(): void {
    let onScreen = this.name;
    window.addEventListener("beforeprint", () => {
      onScreen = this.name;
      this.set("light", false);
    });
    window.addEventListener("afterprint", () => this.set(onScreen, false));
  }

  private set(theme: string, byHand: boolean): void {
    document.documentElement.dataset.theme = theme;
    if (byHand) remember(theme);
    this.style = getComputedStyle(document.documentElement);
    this.colours.clear();
    this.patterns.clear();
    for (const listener of this.listeners) listener();
  }
}

function hatch(ink: string, paper: string): CanvasPattern {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const context = tile.getContext("2d")!;
  context.fillStyle = paper;
  context.fillRect(0, 0, 6, 6);
  context.strokeStyle = ink;
  context.lineWidth = 1.5;
  for (const offset of [-6, 0, 6]) {
    context.moveTo(offset - 1, 7);
    context.lineTo(offset + 7, -1);
  }
  context.stroke();
  return context.createPattern(tile, "repeat")!;
}

// A page opened from a file may have no storage: the theme is then that of the system.
function remembered(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function remember(theme: string): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    return;
  }
}
