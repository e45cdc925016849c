// The critical path and the lost time: one bar each.

import { type Part, partsLegend, stackedBar } from "../bars";
import type { PathShare, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatMilliseconds, formatPercent, significant } from "../format";
import { dataTable } from "../table";
import type { Theme } from "../theme";

const KIND_COLOURS: Record<string, string> = {
  input: "data",
  "garbage collection": "gc",
  host: "idle",
  copies: "span",
  "between steps": "idle",
  "other compute": "span",
  unknown: "bubble",
};

const LOST_PARTS: readonly (readonly [key: string, name: string, colour: string])[] = [
  ["ideal_ns", "ideal", "useful"],
  ["stragglers_ns", "stragglers", "straggler"],
  ["imbalance_ns", "imbalance", "imbalance"],
  ["exposed_communication_ns", "exposed communication", "exposed"],
  ["bubble_ns", "bubble", "bubble"],
  ["input_ns", "input", "data"],
  ["rest_ns", "the rest", "other"],
];

export function showCriticalPath(
  { critical_path: path, ranks }: Summary,
  theme: Theme,
  onRank: (rank: number) => void,
): void {
  const panel = byId("critical-path");
  if (!path?.ns) {
    const text = "Unknown: no step was recorded in full, or the clocks of the hosts could not be aligned.";
    panel.append(element("p", text, "empty"));
    return;
  }
  const sums = new Map<string, Part & { rank: number }>();
  for (const share of path.shares) {
    const name = shareName(share);
    const known = sums.get(name)?.ns ?? 0;
    sums.set(name, {
      name,
      rank: share.rank,
      ns: known + share.ns,
      colour: shareColour(share, theme),
      hatched: share.kind === "unknown",
    });
  }
  const parts = [...sums.values()].sort((a, b) => b.ns - a.ns);
  const unsure =
    path.uncertain_ns >= 0.01 * path.ns
      ? ` ${formatPercent(path.uncertain_ns / path.ns)} of it is uncertain: the clocks agree no better, or starts are bounds.`
      : "";
  panel.append(
    element(
      "p",
      `The path of a step leads back from the end of its last rank to that of the step before: ` +
        `${formatDuration(path.ns / path.steps)} on average.${besideTheMean(path.ns / path.steps, ranks)} It is made of this work ` +
        `and these transfers; making anything else faster does not make it shorter.${unsure}`,
      "hint",
    ),
    stackedBar(parts, path.ns),
    pathLegend(path.shares, path.ns, theme),
    dataTable(
      [
        { heading: "part", text: ({ name }) => name, isWords: true },
        { heading: "ms per step", text: ({ ns }) => formatMilliseconds(ns / path.steps), order: ({ ns }) => ns },
        { heading: "share", text: ({ ns }) => formatPercent(ns / path.ns), order: ({ ns }) => ns },
      ],
      parts,
      ({ rank }) => onRank(rank),
    ),
    element("p", "The key k in the timeline shows the path of one step. A click on a row shows its rank.", "hint"),
  );
}

/** Why the mean path is not as long as the mean step, where it is not. */
function besideTheMean(pathNs: number, ranks: Summary["ranks"]): string {
  const mean = ranks.reduce((sum, { wall_ns }) => sum + wall_ns, 0) / Math.max(ranks.length, 1);
  if (Math.abs(pathNs - mean) <= 0.01 * mean) return "";
  return ` The mean over the ranks is ${formatDuration(mean)}, as not all of them end a step with the last one.`;
}

/** Colours tell kinds of work apart, and transfers by role; ranks are in the table. */
function pathLegend(shares: readonly PathShare[], whole: number, theme: Theme): HTMLElement {
  const sums = new Map<string, Part>();
  for (const share of shares) {
    const { kind, role, ns } = share;
    const name = ["transfer", "unknown"].includes(kind) && role ? `${kind} on ${role}` : kind;
    const known = sums.get(name)?.ns ?? 0;
    sums.set(name, { name, ns: known + ns, colour: shareColour(share, theme), hatched: kind === "unknown" });
  }
  return partsLegend([...sums.values()], whole);
}

function shareName({ rank, kind, role }: PathShare): string {
  return ["transfer", "unknown"].includes(kind) && role ? `${kind} on ${role}` : `rank ${rank}, ${kind}`;
}

function shareColour({ kind, role }: PathShare, theme: Theme): string {
  if (kind === "transfer") return theme.role(role);
  const name = KIND_COLOURS[kind] ?? kind;
  return theme.has(name) ? name : "other";
}

export function showLostTime({ lost_time: lost }: Summary): void {
  const panel = byId("lost-time");
  if (!lost?.steps_ns) {
    panel.append(element("p", "Unknown: the steps of this run could not be replayed.", "empty"));
    return;
  }
  const whole = lost.steps_ns;
  const parts = LOST_PARTS.map(([key, name, colour]) => ({
    name,
    colour,
    ns: lost[key] ?? 0,
    hatched: key === "bubble_ns",
  }));
  const time = (ns: number) =>
    lost.gpus === null ? formatDuration(ns) : `${significant((ns * lost.gpus) / 3.6e12)} GPU-hours`;
  panel.append(
    element(
      "p",
      `Of ${time(whole)} in steps, ${formatPercent(1 - lost.ideal_ns / whole)} is beyond the ideal, in which like work takes as ` +
        "long as on the quicker ranks and nothing waits. The parts add up to the whole.",
      "hint",
    ),
    stackedBar(parts, whole),
    partsLegend(parts, whole),
    dataTable(
      [
        { heading: "part", text: ({ name }) => name, isWords: true },
        { heading: "time", text: ({ ns }) => time(ns), order: ({ ns }) => ns },
        { heading: "share", text: ({ ns }) => formatPercent(ns / whole), order: ({ ns }) => ns },
      ],
      parts.filter(({ ns }) => ns !== 0),
    ),
  );
}
