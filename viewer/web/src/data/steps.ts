// Reads steps. Boxes are read rank by rank, when they are to be shown: a large run has more than a page can hold.

import { BOX_TABLES, Step } from "../timeline/step";
import type { Columns } from "./columns";
import { existing, type Source } from "./source";
import type { Lane, Outline, Rank } from "./types";

interface StepResource {
  step: number;
  duration_ns: number;
  outline: string; // name of a resource
}

interface OutlineResource extends Omit<Outline, "ranks"> {
  lanes: Lane[];
  ranks: (Omit<Rank, "lanes"> & { lanes: number[] })[];
}

export class Steps {
  private readonly outlines = new Map<string, Outline>();

  constructor(private readonly source: Source) {}

  /** Opens a step, without boxes; `name` is `step/12`, or `plan`. */
  async open(name: string): Promise<Step> {
    const [described, ranks] = await Promise.all([
      existing(this.source.json<StepResource>(`${name}.json`), `${name}.json`),
      existing(this.source.table(`${name}/ranks`), `${name}/ranks`),
    ]);
    return new Step(name, described.step, described.duration_ns, await this.outline(described.outline), ranks);
  }

  /** Reads the boxes of ranks that are not there yet, and returns these ranks. */
  async load(step: Step, ranks: readonly number[]): Promise<readonly number[]> {
    const missing = ranks.filter((rank) => step.isMissing(rank));
    if (!missing.length) return [];
    const wanted = this.source.isWhole ? step.ranksWithBoxes : missing;
    step.expect(wanted);
    try {
      const tables = await Promise.all(
        BOX_TABLES.map((table) =>
          existing(this.source.table(`${step.name}/${table}`, wanted), `${step.name}/${table}`),
        ),
      );
      const [work, stalls, host, communication] = tables as [Columns, Columns, Columns, Columns];
      step.add(wanted, { work, stalls, host, communication });
    } catch (error) {
      step.forget(wanted);
      throw error;
    }
    return wanted;
  }

  private async outline(name: string): Promise<Outline> {
    const known = this.outlines.get(name);
    if (known) return known;
    const { lanes, ranks, ...rest } = await existing(this.source.json<OutlineResource>(name), name);
    const outline = {
      ...rest,
      ranks: ranks.map((rank) => ({ ...rank, lanes: rank.lanes.map((lane) => lanes[lane]!) })),
    };
    this.outlines.set(name, outline);
    return outline;
  }
}
