// The timeline with its controls: steps, grouping, colours, search, what is pinned, what is selected.

import { swatch } from "../bars";
import { readStep, type Source } from "../data/source";
import type { RunData } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatPercent, stepName } from "../format";
import { keepView, readView, type View } from "../link";
import { dataTable } from "../table";
import { MICROBATCH_COLOURS, type Theme } from "../theme";
import { facts, headline, kindOf } from "../timeline/facts";
import { GROUPINGS, type Grouping, usualGrouping } from "../timeline/layout";
import { Minimap } from "../timeline/minimap";
import type { ColourBy, TimeRange } from "../timeline/painter";
import { partition } from "../timeline/partition";
import { search } from "../timeline/search";
import { type Box, Step } from "../timeline/step";
import { factNodes, Timeline } from "../timeline/timeline";
import { stragglingRanks } from "./stragglers";

const PHASES = ["forward", "backward", "recompute", "optimizer", "data", "checkpoint", "gc"];

export class TimelinePanel {
  readonly timeline: Timeline;
  private readonly minimap: Minimap;
  private readonly select = byId<HTMLSelectElement>("step");
  private position = -1; // of the step among those of the run's data
  private plan: Step | null = null;
  private loading = 0;

  constructor(
    private readonly run: RunData,
    private readonly source: Source,
    private readonly theme: Theme,
  ) {
    this.timeline = new Timeline(
      byId("stage"),
      byId<HTMLCanvasElement>("timeline"),
      byId("tooltip"),
      theme,
      stragglingRanks(run.summary),
      {
        onPin: (box) => this.showPinned(box),
        onSelect: (range) => this.showSelected(range),
        onMove: () => this.moved(),
      },
    );
    this.timeline.grouping = usualGrouping(run.timeline.ranks);
    this.minimap = new Minimap(byId<HTMLCanvasElement>("minimap"), theme, this.timeline.viewport, (centre) => {
      const half = (this.timeline.viewport.to - this.timeline.viewport.from) / 2;
      this.timeline.look(centre - half, centre + half);
    });
    window.addEventListener("resize", () => this.minimap.draw());
    this.addControls();
  }

  /** Shows the step of the page's address, or the typical one. */
  async start(): Promise<void> {
    const view = readView(location.hash);
    if (GROUPINGS.includes(view.rows as Grouping)) this.timeline.grouping = view.rows as Grouping;
    if (view.colour === "microbatch") this.timeline.colourBy = "microbatch";
    byId<HTMLSelectElement>("grouping").value = this.timeline.grouping;
    byId<HTMLSelectElement>("colour-by").value = this.timeline.colourBy;
    const linked = this.run.steps.findIndex((info) => info.step === view.step);
    await this.choose(linked >= 0 ? linked : this.run.first_shown);
    if (linked >= 0 && view.from !== null && view.to !== null) this.timeline.look(view.from, view.to);
  }

  async choose(position: number): Promise<void> {
    const info = this.run.steps[position];
    if (!info) return;
    const request = ++this.loading;
    const tables = await readStep(this.source, `step/${info.step}`);
    if (request !== this.loading) return; // another step was chosen meanwhile
    this.position = position;
    this.select.value = String(position);
    const step = new Step(info.step, info.duration_ns, this.run.timeline, tables);
    this.timeline.show(step, `${stepName(info.step)} · ${formatDuration(info.duration_ns)}`);
    this.minimap.show(step, this.timeline.grouping);
    this.showLegend(step);
    byId<HTMLButtonElement>("previous").disabled = position === 0;
    byId<HTMLButtonElement>("next").disabled = position === this.run.steps.length - 1;
    byId("timeline").ariaLabel = `Timeline of ${stepName(info.step)}; the tables below have the numbers`;
    byId("stage").dataset.step = String(info.step);
    this.moved();
  }

  /** Shows a rank, by its number. */
  showRank(rank: number): void {
    const index = this.run.timeline.ranks.findIndex((candidate) => candidate.rank === rank);
    if (index < 0) return;
    this.timeline.reveal(index);
    byId("timeline").scrollIntoView({ block: "center" });
  }

  private get view(): View {
    const { viewport, grouping, colourBy } = this.timeline;
    const step = this.run.steps[this.position]?.step ?? null;
    return { step, from: viewport.from, to: viewport.to, rows: grouping, colour: colourBy };
  }

  private moved(): void {
    if (this.position < 0) return;
    this.minimap.draw();
    keepView(() => this.view);
  }

  // ---- controls

  private addControls(): void {
    const { timeline } = this;
    this.run.steps.forEach((info, index) => {
      const name = info.step < 0 ? "whole recording" : String(info.step);
      const option = element("option", [name, formatDuration(info.duration_ns), info.note].filter(Boolean).join(" · "));
      option.value = String(index);
      this.select.append(option);
    });
    const shift = (by: number) => this.choose(this.position + by);
    this.select.addEventListener("change", () => this.choose(Number(this.select.value)));
    const clicks: Record<string, () => void> = {
      previous: () => shift(-1),
      next: () => shift(1),
      "zoom-in": () => timeline.zoom(0.6),
      "zoom-out": () => timeline.zoom(1 / 0.6),
      fit: () => timeline.fit(),
      lanes: () => this.toggleLanes(),
      "show-plan": () => this.togglePlan(),
      "show-help": () => byId<HTMLDialogElement>("help").showModal(),
    };
    for (const [id, action] of Object.entries(clicks)) byId(id).addEventListener("click", action);
    byId("show-plan").hidden = this.run.plan === null;
    this.addChoice("grouping", GROUPINGS, (value) => {
      timeline.setGrouping(value as Grouping);
      if (timeline.step) this.minimap.show(timeline.step, timeline.grouping);
    });
    this.addChoice("colour-by", ["kind", "microbatch"], (value) => {
      timeline.colourBy = value as ColourBy;
      if (timeline.step) this.showLegend(timeline.step);
      timeline.redraw();
      this.moved();
    });
    byId("timeline").addEventListener("keydown", (event) => {
      const keys: Record<string, () => void> = {
        "[": () => shift(-1),
        "]": () => shift(1),
        c: () => this.toggleLanes(),
        p: () => this.togglePlan(),
        "/": () => byId("search").focus(),
      };
      const action = keys[event.key];
      if (!action || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      action();
    });
    document.addEventListener("keydown", (event) => {
      const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
      if (event.key === "?" && !typing) byId<HTMLDialogElement>("help").showModal();
    });
    this.addSearch();
    byId("embedded").textContent = this.run.note;
    byId("precision").textContent = this.precision();
  }

  private addChoice(id: string, values: readonly string[], onChange: (value: string) => void): void {
    const select = byId<HTMLSelectElement>(id);
    select.append(...values.map((value) => element("option", value)));
    select.addEventListener("change", () => onChange(select.value));
  }

  private toggleLanes(): void {
    byId("lanes").ariaPressed = String(this.timeline.toggleLanes());
  }

  private async togglePlan(): Promise<void> {
    const { plan } = this.run;
    if (!plan) return;
    this.plan ??= new Step(-1, plan.duration_ns, plan.outline, await readStep(this.source, "plan"));
    this.timeline.planned = this.timeline.planned ? null : this.plan;
    byId("show-plan").ariaPressed = String(this.timeline.planned !== null);
    byId("plan-note").textContent = this.timeline.planned
      ? `The lower bar of a row is the same schedule with mean forwards and backwards and no transfers: ${formatDuration(plan.duration_ns)} ` +
        "until the last backward is over, without optimizer and data-parallel communication."
      : "";
    this.timeline.redraw();
  }

  private addSearch(): void {
    const [input, list] = [byId<HTMLInputElement>("search"), byId("hits")];
    const close = () => list.replaceChildren();
    input.addEventListener("input", () => {
      const { step } = this.timeline;
      const hits = step ? search(step, input.value) : [];
      list.replaceChildren(
        ...hits.map((hit) => {
          const item = element("button", hit.label);
          item.type = "button";
          item.addEventListener("click", () => {
            if (hit.box) this.timeline.goTo(hit.box);
            else this.timeline.reveal(hit.rank);
            close();
            byId("timeline").focus();
          });
          return item;
        }),
      );
      if (!hits.length && input.value.trim())
        list.append(element("span", "Nothing of that name in this step.", "hint"));
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") list.querySelector("button")?.click();
      if (event.key === "Escape") close();
    });
  }

  // ---- beside the canvas

  private showPinned(box: Box | null): void {
    const panel = byId("pinned");
    const { step } = this.timeline;
    panel.hidden = !box || !step;
    if (!box || !step) return;
    const list = element("dl");
    for (const fact of facts(step, box)) list.append(...factNodes(fact));
    panel.replaceChildren(element("h3", headline(step, box)), list);
    const communication = step.communicationOf(box);
    const members = communication ? step.participants(communication) : [];
    if (members.length > 1) panel.append(...this.participantsTable(step, members));
  }

  private participantsTable(step: Step, members: readonly Box[]): HTMLElement[] {
    const [first, before, last] = [members[0]!, members.at(-2)!, members.at(-1)!];
    const comparable = members.every((box) => step.residual(first, box) !== null);
    const after = (box: Box) => formatDuration(step.start(box) - step.start(first));
    const label = (box: Box) => step.outline.ranks[box.rank]!.label;
    const text = !comparable
      ? "Which rank came last is not known: the clocks of their hosts could not be aligned."
      : step.lastToCome(members)
        ? `${label(last)} came last, ${after(last)} after ${label(first)}.`
        : `Which rank came last is not known: the two latest are ${formatDuration(step.start(last) - step.start(before))} apart, ` +
          `and the clocks' error is ${formatDuration(step.residual(before, last))}.`;
    return [
      element("p", text),
      dataTable(
        [
          { heading: "rank", text: label, order: (box: Box) => box.rank, isWords: true },
          {
            heading: "began after the first",
            text: (box) => (comparable ? after(box) : "–"),
            order: (box) => step.start(box),
          },
          {
            heading: "duration",
            text: (box) => formatDuration(step.value(box, "duration")),
            order: (box) => step.value(box, "duration"),
          },
          {
            heading: "wait",
            text: (box) => waitText(step.value(box, "wait")),
            order: (box) => step.value(box, "wait"),
          },
        ],
        members,
        (box) => this.timeline.goTo(box),
      ),
    ];
  }

  private showSelected(range: TimeRange | null): void {
    const panel = byId("selected");
    const { step } = this.timeline;
    panel.hidden = !range || !step;
    if (!range || !step) return;
    const { ranks } = this.timeline;
    const shares = partition(step, range, ranks);
    const whole = shares.reduce((sum, { ns }) => sum + ns, 0);
    panel.replaceChildren(
      element(
        "h3",
        `${formatDuration(range.to - range.from)} selected, ${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"} shown`,
      ),
      dataTable(
        [
          { heading: "part", text: ({ name }) => name, isWords: true },
          { heading: "mean of a rank", text: ({ ns }) => formatDuration(ns / ranks.length), order: ({ ns }) => ns },
          { heading: "share", text: ({ ns }) => formatPercent(whole ? ns / whole : null), order: ({ ns }) => ns },
        ],
        shares,
      ),
    );
  }

  private precision(): string {
    const residual = this.run.timeline.residual_ns;
    if (!residual) return "The clocks of the hosts could not be aligned: compare times within a host only.";
    if (!residual.p99) return "";
    return `Times of different ranks are comparable to within ${formatDuration(residual.p99)} (p99): the band at the pointer is that wide.`;
  }

  private showLegend(step: Step): void {
    const kinds = new Set<string>();
    const roles = new Set<string>();
    for (const table of ["work", "host"] as const) {
      for (const kind of new Set(step.columns(table).of("kind"))) kinds.add(step.outline.kinds[kind] ?? "");
    }
    const stalls = step.columns("stalls");
    const role = stalls.of("role");
    let bubbles = false;
    for (let row = 0; row < stalls.length; row++) {
      if (kindOf(step, { table: "stalls", rank: 0, row }) === "bubble") bubbles = true;
      else roles.add(step.outline.roles[role[row]!] ?? "");
    }
    const numbered = (kind: string) => (kind === "forward" || kind === "backward" ? `${kind} (microbatch)` : kind);
    const byMicrobatch = this.timeline.colourBy === "microbatch";
    const phases = PHASES.filter(
      (kind) => kinds.has(kind) && !(byMicrobatch && (kind === "forward" || kind === "backward")),
    );
    byId("legend").replaceChildren(
      ...(byMicrobatch ? [element("span", "forward, and paler backward, by microbatch:")] : []),
      ...(byMicrobatch
        ? Array.from({ length: MICROBATCH_COLOURS }, (_, index) => swatch(`microbatch-${index}`, String(index)))
        : []),
      ...phases.map((kind) => swatch(kind, numbered(kind))),
      ...(bubbles ? [swatch("bubble", "pipeline bubble", true)] : []),
      ...[...roles]
        .sort()
        .flatMap((name) => [
          swatch(this.theme.role(name), `wait for ${name}`, true),
          swatch(this.theme.role(name), `transfer on ${name}`),
        ]),
      ...(this.run.summary.stragglers.length ? [element("span", "▲ straggler")] : []),
    );
  }
}

function waitText(wait: number): string {
  return wait < 0 ? "–" : formatDuration(wait);
}
