// Where a page shows what a finding rests on.

import type { Finding } from "../data/types";

const MOST_KEPT = 4; // ranks of a finding whose rows stand out of a closed group

/** The view with the numbers behind a finding, besides the timeline; empty where the timeline itself has them. */
export function viewOf({ kind, place, cause }: Pick<Finding, "kind" | "place" | "cause">): string {
  if (kind === "lost") return { transfer: "communication", schedule: "pipeline" }[cause] ?? "time";
  if (kind === "slow") {
    if (place === "link" || place === "network" || cause === "communication") return "network";
    return place === "stage" ? "pipeline" : "heat-map";
  }
  return "recording";
}

/** Whether a finding says why the job makes no progress. */
export function isStop({ kind }: Pick<Finding, "kind">): boolean {
  return kind === "failed" || kind === "hang";
}

/** Whether the timeline shows a finding: it names ranks, or steps. */
export function isInTimeline({
  kind,
  ranks,
  occurrence,
  stretches,
}: Pick<Finding, "kind" | "ranks" | "occurrence" | "stretches">): boolean {
  return kind === "slow" && (ranks.length > 0 || occurrence !== null || stretches.length > 0);
}

/** Whether a finding holds in a step. */
export function holdsIn(finding: Pick<Finding, "occurrence" | "stretches" | "since_step">, step: number): boolean {
  const { occurrence, stretches, since_step: since } = finding;
  if (occurrence?.steps.length) return occurrence.steps.includes(step);
  if (stretches.length) return stretches.some(({ first, last }) => first <= step && step <= last);
  return step >= since;
}

/**
 * The step that shows a finding: the shown one if the finding holds in it and in most others, else the longest of those
 * in which it holds. Null if none of them can be shown.
 */
export function stepOf(
  finding: Pick<Finding, "occurrence" | "stretches" | "since_step">,
  steps: ReadonlyMap<number, number>, // that can be shown, and their durations
  shown: number | null,
): number | null {
  const among = [...steps.keys()].filter((step) => holdsIn(finding, step));
  const isUsual = !finding.occurrence && !finding.stretches.length;
  if (isUsual && shown !== null && among.includes(shown)) return shown;
  if (isUsual) return among[0] ?? null;
  return among.reduce<number | null>(
    (best, step) => (best === null || steps.get(step)! > steps.get(best)! ? step : best),
    null,
  );
}

/** The ranks of findings whose rows are to be seen: the first few of each. */
export function ranksKept(findings: readonly Pick<Finding, "ranks">[]): Set<number> {
  return new Set(findings.flatMap(({ ranks }) => ranks.slice(0, MOST_KEPT)));
}
