// The key figures of a run, each with what it is of; a click leads to the numbers behind it.

import type { Overview } from "../data/overview";
import type { Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatHours, formatPercent, significant } from "../format";
import { meanWall } from "./state";

export interface Figure {
  name: string;
  value: string;
  detail: string;
  view: string;
}

/** The resource `utilization.json`, as far as the page reads it. */
export interface Utilization {
  mfu: number | null;
  flops_per_second: number; // of one device
}

export function showFigures(
  summary: Summary,
  overview: Overview | null,
  used: Utilization | null,
  show: (view: string) => void,
): void {
  byId("figures").replaceChildren(
    ...figures(summary, overview?.terms.median_ns ?? null, used, summary.run.steps.count === 1).map(
      ({ name, value, detail, view }) => {
        const node = element("button", "", "figure");
        node.type = "button";
        node.title = `${name}: ${value} ${detail}`;
        node.append(element("span", name, "name"), element("strong", value), element("span", detail, "detail"));
        node.addEventListener("click", () => show(view));
        return node;
      },
    ),
  );
}

export function figures(
  summary: Pick<Summary, "ranks" | "lost_time" | "pipeline" | "findings" | "together_ns">,
  medianNs: number | null,
  used: Utilization | null,
  isSingle = false, // one step, which is its own median
): Figure[] {
  const wall = meanWall(summary);
  if (!wall) return [];
  const mean = (value: (rank: Summary["ranks"][number]) => number) =>
    summary.ranks.reduce((sum, rank) => sum + value(rank), 0) / summary.ranks.length;
  const exposed = mean(({ exposed_total_ns }) => exposed_total_ns);
  const bubble = mean(({ bubble_ns }) => bubble_ns);
  const lost = summary.lost_time;
  // What the step loses to it is less than what ranks spend in it: the other part waits for somebody, or costs nothing.
  const costs = (part: string) =>
    lost?.steps_ns && lost[part] ? `; costs ${formatDuration((lost[part] / lost.steps_ns) * wall)}` : "";
  const hasPipeline = (summary.pipeline?.stages ?? 1) > 1;
  return [
    {
      name: "Step",
      value: formatDuration(wall),
      detail: medianNs === null || isSingle ? "mean of the ranks" : `mean; median ${formatDuration(medianNs)}`,
      view: "time",
    },
    {
      name: "Exposed communication",
      value: formatPercent(exposed / wall),
      detail: `${formatDuration(exposed)} a step${costs("exposed_communication_ns")}`,
      view: "communication",
    },
    ...(hasPipeline
      ? [
          {
            name: "Bubble",
            value: formatPercent(bubble / wall),
            detail: `${formatDuration(bubble)} a step${costs("bubble_ns")}`,
            view: "pipeline",
          },
        ]
      : []),
    slowness(summary, wall),
    ...utilization(used),
    ...lostTime(summary),
  ];
}

function slowness({ findings, together_ns: saved }: Pick<Summary, "findings" | "together_ns">, wall: number): Figure {
  const isJudged = findings.every(({ kind }) => kind !== "not_judged");
  const slow = findings.some(({ kind }) => kind === "slow");
  return {
    name: "Slow ranks and links",
    value: slow ? formatPercent(saved / wall) : isJudged ? "none" : "not judged",
    detail: slow ? `cost ${formatDuration(saved)} a step` : "",
    view: "findings",
  };
}

function utilization(used: Utilization | null): Figure[] {
  if (!used?.mfu) return [];
  const rate = significant(used.flops_per_second / 1e12);
  return [{ name: "MFU", value: formatPercent(used.mfu), detail: `${rate} TFLOP/s per GPU`, view: "time" }];
}

function lostTime({ lost_time: lost }: Pick<Summary, "lost_time">): Figure[] {
  if (!lost?.steps_ns) return [];
  const share = 1 - lost.ideal_ns / lost.steps_ns;
  const hours = lost.gpus === null ? null : (share * lost.steps_ns * lost.gpus) / 3.6e12;
  return [
    {
      name: hours === null ? "Lost time" : "Lost GPU-hours",
      value: hours === null ? formatPercent(share) : formatHours(hours),
      detail:
        hours === null || lost.gpus === null
          ? "more than the ideal step"
          : `${formatPercent(share)} of the steps; ${formatHours(share * 24 * lost.gpus)} a day`,
      view: "time",
    },
  ];
}
