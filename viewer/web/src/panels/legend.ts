// What colours and hatches of the timeline mean: those that the ranks of a step which were read have.

import { swatch } from "../bars";
import { byId, element } from "../dom";
import { MICROBATCH_COLOURS, type Theme } from "../theme";
import { kindOf } from "../timeline/facts";
import type { ColourBy } from "../timeline/painter";
import { BUBBLE, type Step } from "../timeline/step";

const PHASES = ["forward", "backward", "recompute", "optimizer", "data", "checkpoint", "gc"];

export class Legend {
  private readonly kinds = new Set<string>();
  private readonly roles = new Set<string>();
  private hasBubbles = false;

  constructor(private readonly step: Step) {}

  /** Adds what the boxes of these ranks show. */
  add(ranks: readonly number[]): void {
    const { step } = this;
    for (const rank of ranks) {
      for (const table of ["work", "host"] as const) {
        for (const kind of new Set(step.columns(table, rank).of("kind")))
          this.kinds.add(step.outline.kinds[kind] ?? "");
      }
      const stalls = step.columns("stalls", rank);
      const role = stalls.of("role");
      for (let row = 0; row < stalls.length; row++) {
        if (kindOf(step, { table: "stalls", rank, row }) === BUBBLE) this.hasBubbles = true;
        else this.roles.add(step.outline.roles[role[row]!] ?? "");
      }
    }
  }

  show(theme: Theme, colourBy: ColourBy, hasStragglers: boolean): void {
    const byMicrobatch = colourBy === "microbatch";
    const isNumbered = (kind: string) => kind === "forward" || kind === "backward";
    const phases = PHASES.filter((kind) => this.kinds.has(kind) && !(byMicrobatch && isNumbered(kind)));
    const microbatches = byMicrobatch ? Array.from({ length: MICROBATCH_COLOURS }, (_, index) => index) : [];
    byId("legend").replaceChildren(
      ...(byMicrobatch ? [element("span", "forward, and paler backward, by microbatch:")] : []),
      ...microbatches.map((index) => swatch(`microbatch-${index}`, String(index))),
      ...phases.map((kind) => swatch(kind, isNumbered(kind) ? `${kind} (microbatch)` : kind)),
      ...(this.hasBubbles ? [swatch("bubble", "pipeline bubble", true)] : []),
      ...[...this.roles]
        .sort()
        .flatMap((name) => [
          swatch(theme.role(name), `wait for ${name}`, true),
          swatch(theme.role(name), `transfer on ${name}`),
        ]),
      ...(hasStragglers ? [element("span", "▲ straggler")] : []),
    );
  }
}
