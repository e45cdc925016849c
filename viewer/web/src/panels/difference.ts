// The step that is shown compared with the typical one: a sentence above the rows, and tables by part and by rank.

import type { Columns } from "../data/columns";
import type { Source } from "../data/source";
import { button, byId, element } from "../dom";
import { formatDuration, formatPercent, stepName } from "../format";
import { dataTable } from "../table";
import { difference, type RankDifference, type StepDifference } from "../timeline/difference";
import type { Step } from "../timeline/step";
import type { Timeline } from "../timeline/timeline";

export class DifferencePanel {
  private isOpen = false;
  private readonly tables = new Map<string, Columns | null>();

  constructor(
    private readonly source: Source,
    private readonly timeline: Timeline,
    private readonly typical: number | null, // a step
    private readonly onRank: (rank: number) => void, // by its number
  ) {}

  /** Compares the step that the timeline shows. */
  async update(): Promise<void> {
    const { step } = this.timeline;
    const [line, panel] = [byId("difference"), byId("difference-beside")];
    const isTypical = !step || this.typical === null || step.number === this.typical;
    line.hidden = true;
    panel.hidden = true;
    if (isTypical) return;
    const [own, typical] = await Promise.all([this.parts(step.name), this.parts(`step/${this.typical}`)]);
    if (step !== this.timeline.step || !own || !typical) return; // another one was chosen meanwhile
    const found = difference(own, typical);
    const more = button("By part and rank", "Show what is longer and what is shorter (x)", () => this.toggle());
    more.ariaPressed = String(this.isOpen);
    line.replaceChildren(element("span", this.sentence(step, found)), more);
    line.hidden = false;
    panel.replaceChildren(...this.beside(step, found));
    panel.hidden = !this.isOpen;
  }

  toggle(): void {
    if (byId("difference").hidden) return;
    this.isOpen = !this.isOpen;
    byId("difference-beside").hidden = !this.isOpen;
    byId("difference").querySelector("button")!.ariaPressed = String(this.isOpen);
  }

  private async parts(step: string): Promise<Columns | null> {
    const name = `${step}/parts`;
    const known = this.tables.get(name);
    if (known !== undefined) return known;
    const table = await this.source.table(name);
    this.tables.set(name, table);
    return table;
  }

  private sentence(step: Step, { leaders, parts }: StepDifference): string {
    const typical = parts.reduce((sum, { before }) => sum + before, 0);
    const more = parts.reduce((sum, { ns }) => sum + ns, 0) - typical;
    const whole =
      `${formatDuration(Math.abs(more))} (${formatPercent(Math.abs(more) / typical)}) ` +
      `${more < 0 ? "shorter" : "longer"} than the typical ${stepName(this.typical!)}.`;
    const [first] = leaders;
    if (more <= 0 || !parts.length) return whole;
    if (first) {
      const names = leaders.map(({ rank }) => hostedName(step, rank)).join(", ");
      return `${whole} Most is added on ${names}: ${first.part} ${signed(first.partMore)}.`;
    }
    const [longest] = parts;
    return `${whole} All ranks are alike; most is added by ${longest!.name}: ${signed(longest!.ns - longest!.before)}.`;
  }

  private beside(step: Step, { parts, ranks }: StepDifference): HTMLElement[] {
    const [byPart, byRank, columns] = [element("div"), element("div"), element("div", "", "columns")];
    byPart.append(
      element("h3", "By part, mean of the ranks"),
      dataTable(
        [
          { heading: "part", text: ({ name }) => name, isWords: true },
          { heading: stepName(step.number), text: ({ ns }) => formatDuration(ns), order: ({ ns }) => ns },
          { heading: `typical`, text: ({ before }) => formatDuration(before), order: ({ before }) => before },
          {
            heading: "difference",
            text: ({ ns, before }) => signed(ns - before),
            order: ({ ns, before }) => ns - before,
          },
        ],
        parts,
      ),
    );
    byRank.append(
      element("h3", "By rank, waiting for others left out"),
      dataTable<RankDifference>(
        [
          {
            heading: "rank",
            text: ({ rank }) => step.outline.ranks[rank]!.label,
            order: ({ rank }) => rank,
            isWords: true,
          },
          { heading: "difference", text: ({ more }) => signed(more), order: ({ more }) => more },
          { heading: "most of it", text: ({ part, partMore }) => `${part} ${signed(partMore)}`, isWords: true },
        ],
        ranks,
        ({ rank }) => this.onRank(step.outline.ranks[rank]!.rank),
      ),
    );
    columns.append(byPart, byRank);
    return [columns];
  }
}

function hostedName(step: Step, rank: number): string {
  const { rank: number, host } = step.outline.ranks[rank]!;
  return host ? `rank ${number} on ${host}` : `rank ${number}`;
}

function signed(ns: number): string {
  return `${ns < 0 ? "−" : "+"}${formatDuration(Math.abs(ns))}`;
}
