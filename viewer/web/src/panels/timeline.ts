// The timeline with its controls: steps, grouping, colours, search, what is pinned, what is selected.

import type { Source } from "../data/source";
import { Steps } from "../data/steps";
import type { RunData } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatPercent, stepName } from "../format";
import { keepTimeline, readView, type View } from "../link";
import { dataTable } from "../table";
import type { Theme } from "../theme";
import { facts, headline } from "../timeline/facts";
import { GROUPINGS, type Grouping, usualGrouping } from "../timeline/layout";
import { Minimap } from "../timeline/minimap";
import type { ColourBy, TimeRange } from "../timeline/painter";
import { partition } from "../timeline/partition";
import { search } from "../timeline/search";
import type { Box, Step } from "../timeline/step";
import { factNodes, Timeline } from "../timeline/timeline";
import { CriticalPathPanel } from "./critical_path";
import { DifferencePanel } from "./difference";
import { Legend } from "./legend";

const MOST_READ = 64; // so many ranks of a communication are read without asking

export class TimelinePanel {
  readonly timeline: Timeline;
  private readonly minimap: Minimap;
  private readonly select = byId<HTMLSelectElement>("step");
  private readonly steps: Steps;
  private readonly criticalPath: CriticalPathPanel;
  private readonly difference: DifferencePanel;
  private number: number | null = null; // of the step that is shown
  private other = "other"; // the resource that is drawn under the steps, where the plan is not
  private readonly under = new Map<string, Step>();
  private legend: Legend | null = null;
  private requests = 0;
  private chosen = false;

  constructor(
    private readonly run: RunData,
    source: Source,
    private readonly theme: Theme,
  ) {
    this.steps = new Steps(source);
    this.timeline = new Timeline(byId("stage"), byId<HTMLCanvasElement>("timeline"), byId("tooltip"), theme, {
      onPin: (box) => this.showPinned(box),
      onSelect: (range) => this.showSelected(range),
      onMove: () => this.moved(),
      onMissing: (ranks) => this.load(ranks),
    });
    this.minimap = new Minimap(byId<HTMLCanvasElement>("minimap"), theme, this.timeline.viewport, (centre) => {
      const half = (this.timeline.viewport.to - this.timeline.viewport.from) / 2;
      this.timeline.look(centre - half, centre + half);
    });
    this.criticalPath = new CriticalPathPanel(source, this.timeline, run.critical_kinds);
    this.difference = new DifferencePanel(source, this.timeline, run.first_shown, (rank) => this.showRanks([rank]));
    window.addEventListener("resize", () => this.minimap.draw());
    this.addControls();
  }

  /** Shows the step of the page's address, or the typical one. */
  async start(): Promise<void> {
    const view = readView(location.hash);
    if (view.colour === "microbatch") this.timeline.colourBy = "microbatch";
    byId<HTMLSelectElement>("colour-by").value = this.timeline.colourBy;
    const linked = view.step !== null && this.run.can_show.includes(view.step);
    const step = await this.steps.open(`step/${linked ? view.step : this.run.first_shown}`);
    const isGrouping = GROUPINGS.includes(view.rows as Grouping);
    this.timeline.grouping = isGrouping ? (view.rows as Grouping) : usualGrouping(step.outline.ranks);
    byId<HTMLSelectElement>("grouping").value = this.timeline.grouping;
    byId("precision").textContent = precision(step);
    this.chosen = linked;
    await this.show(step);
    if (showsLanesOnly(step)) this.toggleLanes();
    if (linked && view.from !== null && view.to !== null) this.timeline.look(view.from, view.to);
  }

  /** Shows a step, by its number. */
  async choose(number: number): Promise<void> {
    this.chosen = true;
    const request = ++this.requests;
    const step = await this.steps.open(`step/${number}`);
    if (request === this.requests) await this.show(step); // else another step was chosen meanwhile
  }

  private async show(step: Step): Promise<void> {
    const { number } = step;
    this.number = number;
    const position = this.run.can_show.indexOf(number);
    if (!this.run.steps.some((info) => info.step === number)) this.addOption(number, step.length, "");
    this.select.value = String(number);
    this.legend = new Legend(step);
    this.timeline.show(step, `${stepName(number)} · ${formatDuration(step.length)}`);
    byId<HTMLButtonElement>("previous").disabled = position <= 0;
    byId<HTMLButtonElement>("next").disabled = position === this.run.can_show.length - 1;
    byId("timeline").ariaLabel = `Timeline of ${stepName(number)}; the tables below have the numbers`;
    await Promise.all([this.load(this.timeline.visibleRanks), this.criticalPath.update(), this.difference.update()]);
    byId("stage").dataset.step = String(number);
    this.moved();
  }

  private async load(ranks: readonly number[]): Promise<void> {
    const { step } = this.timeline;
    const added = step ? await this.steps.load(step, ranks) : [];
    if (!step || !added.length || step !== this.timeline.step) return;
    this.timeline.layOut();
    this.minimap.show(step, this.timeline.grouping);
    this.legend?.add(added);
    this.showLegend();
    if (this.timeline.pinned) this.showPinned(this.timeline.pinned);
  }

  /** Marks the ranks that findings name, by their numbers; the rows of those in `kept` are shown in closed groups too. */
  mark(named: ReadonlySet<number>, kept: ReadonlySet<number>): void {
    this.timeline.named = named;
    this.timeline.kept = kept;
    this.timeline.layOut();
    this.showLegend();
  }

  /** Shows ranks, by their numbers, and marks their rows. */
  showRanks(ranks: readonly number[]): void {
    this.timeline.marked = new Set(ranks);
    const index = this.timeline.step?.indexOf(ranks[0] ?? -1) ?? -1;
    if (index >= 0) this.timeline.reveal(index);
    this.timeline.redraw();
  }

  /** The number of the step that is shown; null before the first is there. */
  get shown(): number | null {
    return this.number;
  }

  /** Whether a step of the page's address is shown, or the user chose one. */
  get isChosen(): boolean {
    return this.chosen;
  }

  private get view(): Omit<View, "view"> {
    const { viewport, grouping, colourBy } = this.timeline;
    return { step: this.number, from: viewport.from, to: viewport.to, rows: grouping, colour: colourBy };
  }

  private moved(): void {
    if (this.number === null) return;
    this.minimap.draw();
    keepTimeline(() => this.view);
  }

  // ---- controls

  private addControls(): void {
    const { timeline } = this;
    const { steps, can_show } = this.run;
    for (const info of steps) this.addOption(info.step, info.duration_ns, info.note);
    const shift = (by: number) => {
      const next = can_show[can_show.indexOf(this.number ?? -1) + by];
      if (next !== undefined) this.choose(next);
    };
    const any = byId<HTMLInputElement>("any-step");
    any.hidden = can_show.length === steps.length;
    any.title = `${can_show[0]} to ${can_show.at(-1)}`;
    any.addEventListener("change", () => {
      const number = Number(any.value);
      any.setCustomValidity(can_show.includes(number) ? "" : `Step ${any.value} was not recorded, or is left out.`);
      if (any.reportValidity()) this.choose(number);
    });
    this.select.addEventListener("change", () => this.choose(Number(this.select.value)));
    const clicks: Record<string, () => void> = {
      previous: () => shift(-1),
      next: () => shift(1),
      "zoom-in": () => timeline.zoom(0.6),
      "zoom-out": () => timeline.zoom(1 / 0.6),
      fit: () => timeline.fit(),
      lanes: () => this.toggleLanes(),
      "show-plan": () => this.toggleUnder("plan"),
      "show-other": () => this.toggleUnder("other"),
      "show-help": () => byId<HTMLDialogElement>("help").showModal(),
    };
    for (const [id, action] of Object.entries(clicks)) byId(id).addEventListener("click", action);
    byId("show-plan").hidden = !this.run.has_plan;
    this.addChoice("grouping", GROUPINGS, (value) => {
      timeline.setGrouping(value as Grouping);
      if (timeline.step) this.minimap.show(timeline.step, timeline.grouping);
    });
    this.addChoice("colour-by", ["kind", "microbatch"], (value) => {
      timeline.colourBy = value as ColourBy;
      this.showLegend();
      timeline.redraw();
      this.moved();
    });
    byId("timeline").addEventListener("keydown", (event) => {
      const keys: Record<string, () => void> = {
        "[": () => shift(-1),
        "]": () => shift(1),
        c: () => this.toggleLanes(),
        p: () => this.toggleUnder("plan"),
        o: () => this.toggleUnder("other"),
        k: () => this.criticalPath.toggle(),
        x: () => this.difference.toggle(),
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
  }

  private addOption(step: number, duration: number, note: string): void {
    if ([...this.select.options].some((option) => option.value === String(step))) return;
    const name = step < 0 ? "whole recording" : String(step);
    const option = element("option", [name, formatDuration(duration), note].filter(Boolean).join(" · "));
    option.value = String(step);
    this.select.append(option);
  }

  private addChoice(id: string, values: readonly string[], onChange: (value: string) => void): void {
    const select = byId<HTMLSelectElement>(id);
    select.append(...values.map((value) => element("option", value)));
    select.addEventListener("change", () => onChange(select.value));
  }

  private toggleLanes(): void {
    byId("lanes").ariaPressed = String(this.timeline.toggleLanes());
  }

  /** Offers the typical step of another run, the resource `other`, under the steps of this one. */
  offerOther(): void {
    byId("show-other").hidden = false;
  }

  /** Shows a predicted step under the steps of this run, instead of another run's. */
  async showPredicted(name: string): Promise<void> {
    this.other = name;
    byId("show-other").textContent = "Predicted step";
    byId("show-other").title = "Show the predicted step under this one (o)";
    this.offerOther();
    await this.toggleUnder("other");
  }

  private async toggleUnder(which: "plan" | "other"): Promise<void> {
    if (byId(`show-${which}`).hidden) return;
    const name = which === "other" ? this.other : which;
    let shown: Step | null = null;
    if (this.timeline.planned?.name !== name) {
      try {
        shown = await this.openUnder(name);
      } catch (error) {
        byId("plan-note").textContent = `It cannot be shown: ${error instanceof Error ? error.message : error}`;
        return;
      }
    }
    this.timeline.planned = shown;
    byId("show-plan").ariaPressed = String(shown?.name === "plan");
    byId("show-other").ariaPressed = String(shown?.name === this.other);
    byId("plan-note").textContent = shown ? noteUnder(shown) : "";
    this.timeline.redraw();
  }

  private async openUnder(name: string): Promise<Step> {
    const known = this.under.get(name);
    if (known) return known;
    const step = await this.steps.open(name);
    await this.steps.load(step, [...step.outline.ranks.keys()]);
    this.under.set(name, step);
    return step;
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
    const [columns, participants] = [element("div", "", "columns"), element("div")];
    columns.append(list, participants);
    panel.replaceChildren(element("h3", headline(step, box)), columns);
    const communication = step.communicationOf(box);
    if (communication) this.showParticipants(participants, step, communication);
  }

  private showParticipants(panel: HTMLElement, step: Step, communication: Box): void {
    const members = step.membersOf(communication);
    if (members.length < 2) return;
    const missing = members.filter((rank) => step.isMissing(rank));
    if (missing.length && members.length <= MOST_READ) {
      this.load(missing); // which shows this box once more
      return;
    }
    const read = step.participants(communication);
    if (members.every((rank) => step.isRead(rank)) && read.length > 1)
      panel.append(...this.participantsTable(step, read));
    else panel.append(element("p", lastOfAll(step, communication, read.length, members.length)));
    if (missing.length) {
      const button = element("button", `Read all ${members.length} ranks of it`);
      button.type = "button";
      button.addEventListener("click", () => this.load(missing));
      panel.append(button);
    }
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

  private showLegend(): void {
    this.legend?.show(this.theme, this.timeline.colourBy, this.timeline.named.size > 0);
  }
}

function lastOfAll(step: Step, communication: Box, read: number, members: number): string {
  const last = step.indexOf(step.value(communication, "last"));
  const who =
    last < 0
      ? "Which rank came last is not known."
      : `${step.outline.ranks[last]!.label} came last, as the aligned clocks show it.`;
  return `${who} The boxes of ${read} of the ${members} ranks that took part are here.`;
}

function precision({ outline: { residual_ns: residual } }: Step): string {
  if (!residual) return "The clocks of the hosts could not be aligned: compare times within a host only.";
  if (!residual.p99) return "";
  return `Times of different ranks are comparable to within ${formatDuration(residual.p99)} (p99): the band at the pointer is that wide.`;
}

function waitText(wait: number): string {
  return wait < 0 ? "–" : formatDuration(wait);
}

function noteUnder(step: Step): string {
  if (step.name.startsWith("whatif/")) {
    return `The lower bar of a row is ${stepName(step.number)} as predicted, on the same rank: ${formatDuration(step.duration)}.`;
  }
  if (step.name === "other") {
    return `The lower bar of a row is ${stepName(step.number)} of the other run, its typical one, on the same rank: ${formatDuration(step.duration)}.`;
  }
  return (
    `The lower bar of a row is the same schedule with mean forwards and backwards and no transfers: ${formatDuration(step.duration)} ` +
    "until the last backward is over, without optimizer and data-parallel communication."
  );
}

/** Whether nothing in the main rows tells of communication, as in a recording of kernels: it is in the lanes alone. */
function showsLanesOnly(step: Step): boolean {
  const read = step.ranksWithBoxes.filter((rank) => step.isRead(rank));
  const has = (table: "stalls" | "communication") => read.some((rank) => step.columns(table, rank).length > 0);
  return has("communication") && !has("stalls");
}
