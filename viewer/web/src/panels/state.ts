// Beside every view: whether the job is well, and what it loses time to. A click on a finding leads to its evidence.

import type { Finding, Summary } from "../data/types";
import { button, byId, element } from "../dom";
import { formatDuration, formatHours, formatPercent, joined } from "../format";
import { whenItHolds } from "./findings";

const LEAST_SHARE = 0.005; // of a step: smaller losses stand in the view of all findings only

const STOPS: Partial<Record<Finding["kind"], { job: string; ranks: string }>> = {
  failed: { job: "The job failed", ranks: "failed" },
  hang: { job: "The job makes no progress", ranks: "no progress" },
  mismatch: { job: "Ranks do not call the same", ranks: "other calls than the others" },
  silent: { job: "Ranks no longer report", ranks: "silent" },
};

export interface Evidence {
  /** Shows what a finding rests on. */
  show(finding: Finding): void;
  /** Further places with numbers on it: what each is called, and what leads there. */
  others(finding: Finding): [name: string, go: () => void][];
  all(): void;
}

/** The findings beside every view, one of which is open. */
export interface OpenFinding {
  open(finding: Finding): void;
  /** Offers the places that have come since the open one was opened. */
  refresh(): void;
}

/** Shows the state of the job and its findings. */
export function showState(summary: Summary, evidence: Evidence): OpenFinding {
  const heading = byId("state-heading");
  const { words, level } = judgement(summary);
  const badge = element("span", summary.state || "recorded", level === "bad" ? "badge bad" : "badge");
  heading.replaceChildren(badge, element("span", words, `judged ${level}`));
  const shown = summary.findings.filter(isShown);
  // The list says what costs most, and a finding what to do: only why a job stopped needs more words.
  byId("verdict").textContent = level === "bad" || !shown.length ? summary.verdict : "";
  const unit = summary.lost_time && summary.lost_time.gpus === null ? "rank-hours" : "GPU-hours";
  const cards = new Map(shown.map((finding) => [finding, card(finding, evidence, unit)]));
  byId("found").replaceChildren(...cards.values());
  const rest = summary.findings.length - shown.length;
  if (rest > 0) {
    const more = byId("found-more");
    const all = button(`${rest} more, each below ${formatPercent(LEAST_SHARE)}`, "Show all findings", evidence.all);
    all.className = "link";
    more.replaceChildren(all);
    more.hidden = false;
  }
  let chosen: Finding | null = null;
  const refresh = () => {
    for (const [finding, node] of cards) {
      const isOpen = finding === chosen;
      node.classList.toggle("open", isOpen);
      node.querySelector("button")!.ariaExpanded = String(isOpen);
      node.querySelector<HTMLElement>(".behind")!.hidden = !isOpen;
      if (isOpen) node.querySelector(".links")!.replaceChildren(...evidence.others(finding).map(linkTo));
    }
  };
  return {
    refresh,
    open: (finding) => {
      chosen = finding;
      refresh();
    },
  };
}

function linkTo([name, go]: [name: string, go: () => void]): HTMLElement {
  return button(name, `Show it in: ${name}`, go);
}

function isShown({ kind, share, occurrence }: Finding): boolean {
  if (kind !== "lost" || share === null) return true;
  return share >= LEAST_SHARE || (occurrence !== null && share > 0);
}

/** One line on the job, and how bad that is. */
export function judgement(summary: Pick<Summary, "findings" | "run" | "ranks" | "together_ns">): {
  words: string;
  level: "bad" | "warn" | "good" | "unknown";
} {
  const { findings, run } = summary;
  const stop = findings.map(({ kind }) => STOPS[kind]).find((words) => words);
  if (stop) return { words: stop.job, level: "bad" };
  const slow = findings.filter(({ kind }) => kind === "slow");
  if (slow.length) {
    const saved = summary.together_ns;
    const wall = meanWall(summary);
    const cost = saved && wall ? ` by ${formatDuration(saved)} (${formatPercent(saved / wall)})` : "";
    const what = slow.length === 1 ? "One fault slows" : `${slow.length} faults slow`;
    return { words: `${what} the steps${cost}`, level: "warn" };
  }
  if (!run.steps.count) return { words: "Not judged: no step was recorded in full", level: "unknown" };
  if (findings.some(({ kind }) => kind === "not_judged")) return { words: "Not all could be judged", level: "unknown" };
  return { words: "No rank, host, stage or link slows the steps", level: "good" };
}

/** Mean step of the ranks, ns; 0 without any. */
export function meanWall({ ranks }: Pick<Summary, "ranks">): number {
  return ranks.reduce((sum, { wall_ns }) => sum + wall_ns, 0) / Math.max(ranks.length, 1);
}

function card(finding: Finding, evidence: Evidence, unit: string): HTMLElement {
  const node = element("li", "", `finding ${finding.kind}`);
  const head = button("", "Show the evidence", () => evidence.show(finding));
  const title = element("span", titleOf(finding), "what");
  const line = element("span", "", "share");
  line.textContent = finding.share === null ? "" : formatPercent(finding.share);
  const bar = element("i", "", "measure");
  bar.style.width = `${100 * Math.min(Math.max(finding.share ?? 0, 0), 1)}%`;
  head.append(title, line, element("span", costs(finding, unit), "costs"));
  if (finding.share) head.append(bar);
  const behind = element("div", "", "behind");
  behind.hidden = true;
  if (finding.kind !== "not_judged" && finding.evidence) behind.append(element("p", finding.evidence));
  if (finding.advice) behind.append(element("p", finding.advice, "advice"));
  behind.append(element("p", "", "bar links"));
  node.append(head, behind);
  return node;
}

function titleOf({ kind, words, text }: Finding): string {
  const stop = STOPS[kind];
  return kind === "not_judged" ? text : stop ? `${words}: ${stop.ranks}` : words;
}

/** What a finding costs, and since when. */
function costs(finding: Finding, unit: string): string {
  const { cost_ns: cost, occurrence, gpu_hours_per_day: hours } = finding;
  const perStep =
    cost === null || occurrence ? "" : `${finding.cost_is_bound ? "at most " : ""}${formatDuration(cost)} a step`;
  return joined([
    occurrence ? `${formatDuration(occurrence.total_ns)} in all` : perStep,
    hours ? `${formatHours(hours)} ${unit} a day` : "",
    whenItHolds(finding),
  ]);
}
