// What colours and hatches of the timeline mean: those that the ranks of a step which were read have.

import { swatch } from "../bars";
import type { Lane } from "../data/types";
import { byId, element } from "../dom";
import { MICROBATCH_COLOURS, type Theme } from "../theme";
import { isWeightGradient, kindOf, residualOf } from "../timeline/facts";
import type { ColourBy } from "../timeline/painter";
import { IN_NO_SPAN, partition } from "../timeline/partition";
import { BOX_TABLES, type BoxTable, BUBBLE, type Step } from "../timeline/step";

const PHASES = [
  "forward",
  "backward",
  "backward-weight",
  "recompute",
  "optimizer",
  "data",
  "checkpoint",
  "evaluation",
  "gc",
];

const LABELS: Record<string, string> = {
  forward: "forward (microbatch)",
  "backward-weight": "backward, weights",
};

const LEAST_GAP = 0.05; // share of a step in no span from which the legend says so

export class Legend {
  private readonly kinds = new Set<string>();
  private readonly roles = new Set<string>();
  private hasBubbles = false;
  private hasGaps = false;
  private hasChunks = false;
  private hasUncertain = false;

  constructor(private readonly step: Step) {}

  /** Adds what the boxes of these ranks show. */
  add(ranks: readonly number[]): void {
    const { step } = this;
    for (const rank of ranks) {
      for (const kind of new Set(step.columns("host", rank).of("kind"))) this.kinds.add(step.outline.kinds[kind] ?? "");
      this.addWork(rank);
      if (!this.hasGaps) this.hasGaps = hasGaps(step, rank);
      if (!this.hasUncertain) this.hasUncertain = BOX_TABLES.some((table) => hasUncertain(step, table, rank));
      const stalls = step.columns("stalls", rank);
      const role = stalls.of("role");
      for (let row = 0; row < stalls.length; row++) {
        if (kindOf(step, { table: "stalls", rank, row }) === BUBBLE) this.hasBubbles = true;
        else this.roles.add(step.outline.roles[role[row]!] ?? "");
      }
      // A recording of kernels has no stalls: what waits is seen in the lanes of communication alone.
      if (!stalls.length) for (const lane of usedLanes(step, rank)) this.roles.add(lane.role);
    }
  }

  private addWork(rank: number): void {
    const { outline } = this.step;
    const work = this.step.columns("work", rank);
    const [kind, name] = [work.of("kind"), work.of("name")];
    for (let row = 0; row < work.length; row++) {
      const text = outline.kinds[kind[row]!] ?? "";
      const isWeights = text === "backward" && isWeightGradient(outline.names[name[row]!] ?? "");
      this.kinds.add(isWeights ? "backward-weight" : text);
    }
    if (!this.hasChunks && work.has("chunk")) this.hasChunks = work.of("chunk").some((chunk) => chunk > 0);
  }

  show(theme: Theme, colourBy: ColourBy, hasStragglers: boolean): void {
    const byMicrobatch = colourBy === "microbatch";
    const isNumbered = (kind: string) => kind === "forward" || kind === "backward";
    const phases = PHASES.filter((kind) => this.kinds.has(kind) && !(byMicrobatch && isNumbered(kind)));
    const grey = [...this.kinds].filter((kind) => !theme.has(kind)).sort();
    const microbatches = byMicrobatch ? Array.from({ length: MICROBATCH_COLOURS }, (_, index) => index) : [];
    byId("legend").replaceChildren(
      ...(byMicrobatch ? [element("span", "forward, and paler backward, by microbatch:")] : []),
      ...microbatches.map((index) => swatch(`microbatch-${index}`, String(index))),
      ...phases.map((kind) => swatch(kind, LABELS[kind] ?? kind)),
      ...(grey.length ? [swatch("span", grey.join(", "))] : []),
      ...(this.hasChunks && !byMicrobatch
        ? [
            swatch("forward-odd-chunk", "forward of an odd chunk (microbatch·chunk)"),
            swatch("backward-odd-chunk", "backward of one"),
          ]
        : []),
      ...(this.hasGaps ? [swatch("row", "in no span")] : []),
      ...(this.hasBubbles ? [swatch("bubble", "pipeline bubble", true)] : []),
      ...(this.roles.size ? [element("span", "hatched: wait, full: transfer:")] : []),
      ...[...this.roles].sort().map((name) => {
        const both = swatch(theme.role(name), "", true);
        both.append(swatch(theme.role(name), name));
        return both;
      }),
      ...(this.hasUncertain ? [element("span", "pale: shorter than the clocks of hosts agree")] : []),
      ...(hasStragglers ? [element("span", "▲ named by a finding")] : []),
    );
  }
}

/** Whether a good part of a rank's step shows the ground of its row. */
function hasGaps(step: Step, rank: number): boolean {
  const shares = partition(step, { from: step.from[rank]!, to: step.to[rank]! }, [rank]);
  const whole = shares.reduce((sum, { ns }) => sum + ns, 0);
  return shares.some(({ name, ns }) => name === IN_NO_SPAN && ns > LEAST_GAP * whole);
}

function hasUncertain(step: Step, table: BoxTable, rank: number): boolean {
  const residual = residualOf(step);
  return step
    .columns(table, rank)
    .of("duration")
    .some((duration) => duration < residual);
}

function usedLanes(step: Step, rank: number): Lane[] {
  const lanes = new Set(step.columns("communication", rank).of("lane"));
  return [...lanes].map((lane) => step.outline.ranks[rank]!.lanes[lane]!);
}
