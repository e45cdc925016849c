// The critical path of the step that is shown, over the timeline, and its sum by rank and kind beside it.

import type { Source } from "../data/source";
import { byId, element } from "../dom";
import { formatDuration, formatPercent, stepName } from "../format";
import { dataTable } from "../table";
import { CriticalPath, type Share } from "../timeline/critical_path";
import type { Step } from "../timeline/step";
import type { Timeline } from "../timeline/timeline";

export class CriticalPathPanel {
  private isOn = false;

  constructor(
    private readonly source: Source,
    private readonly timeline: Timeline,
    private readonly kinds: readonly string[],
  ) {
    byId("show-critical").addEventListener("click", () => this.toggle());
  }

  async toggle(): Promise<void> {
    this.isOn = !this.isOn;
    byId("show-critical").ariaPressed = String(this.isOn);
    await this.update();
  }

  /** Shows the path of the step that the timeline shows, if it is asked for. */
  async update(): Promise<void> {
    const { timeline } = this;
    const { step } = timeline;
    const panel = byId("critical-beside");
    timeline.overlay = null;
    panel.hidden = !this.isOn || !step;
    timeline.redraw();
    if (!this.isOn || !step) return;
    const table = await this.source.table(`${step.name}/critical`);
    if (!this.isOn || timeline.step !== step) return; // it was let go of meanwhile
    if (!table) {
      panel.replaceChildren(
        element("p", "The critical path is unknown: the clocks of the hosts could not be aligned.", "empty"),
      );
      return;
    }
    const path = new CriticalPath(table, this.kinds, step.outline);
    timeline.overlay = path;
    timeline.redraw();
    panel.replaceChildren(...this.beside(step, path));
  }

  private beside(step: Step, path: CriticalPath): HTMLElement[] {
    const { length } = path;
    const shares = path.shares();
    const uncertain = shares.reduce((sum, share) => sum + share.uncertain, 0);
    const name = ({ rank, kind, role }: Share) =>
      rank < 0
        ? `${kind} on ${role}`
        : [step.outline.ranks[rank]!.label, kind, role && `waiting on ${role}`].filter(Boolean).join(" · ");
    return [
      element("h3", `Critical path of ${stepName(step.number)}: ${formatDuration(length)}`),
      dataTable(
        [
          { heading: "part", text: name, isWords: true },
          { heading: "time", text: ({ ns }) => formatDuration(ns), order: ({ ns }) => ns },
          { heading: "share", text: ({ ns }) => formatPercent(ns / length), order: ({ ns }) => ns },
        ],
        shares,
        (share) => this.goTo(share),
      ),
      element(
        "p",
        "A click shows the longest piece. A rank that is not shown is in the heading of its group." +
          (uncertain > 0.0005 * length
            ? ` ${formatPercent(uncertain / length)} is uncertain (dashed): the clocks agree no better, or a start is a bound.`
            : ""),
        "hint",
      ),
    ];
  }

  private goTo({ longest: { rank, start, end } }: Share): void {
    this.timeline.reveal(rank);
    this.timeline.look(start - (end - start), end + (end - start));
    byId("timeline").scrollIntoView({ block: "center" });
  }
}
