// What slows the job, what else it loses time to, and what could not be judged: the list of every command.

import type { Finding, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatPercent, formatRanks, utc } from "../format";
import { dataTable } from "../table";

export function showFindings(summary: Summary, onRank: (rank: number) => void): void {
  const panel = byId("findings");
  const told = summary.findings.filter(({ kind }) => kind !== "not_judged");
  if (told.length) {
    const columns = [
      { heading: "finding", text: (found: Finding) => found.words, isWords: true },
      { heading: "when", text: whenItHolds, isWords: true },
      { heading: "ms per step", text: cost, order: (found: Finding) => found.cost_ns ?? 0 },
      { heading: "share", text: share, order: (found: Finding) => found.share ?? 0 },
      { heading: "evidence", text: (found: Finding) => found.evidence, isWords: true },
      { heading: "what to do", text: (found: Finding) => found.advice, isWords: true },
    ];
    panel.append(dataTable(columns, told, (found) => found.ranks.length && onRank(found.ranks[0]!)));
  }
  if (!told.some(({ kind }) => kind !== "lost")) panel.append(element("p", nothingFound(summary), "empty"));
  const awaited = summary.awaited?.[0];
  if (awaited?.stands_out) {
    const text = awaited.because
      ? `rank ${awaited.rank} (${formatPercent(awaited.share)} of all waiting), named above`
      : awaited.text;
    panel.append(element("p", `Waited for most: ${text}.`, "hint"));
  }
  const notJudged = summary.findings.filter(({ kind }) => kind === "not_judged");
  panel.append(...notJudged.map(({ text }) => element("p", text, "hint")));
}

export function namedRanks(summary: Pick<Summary, "findings">): Set<number> {
  return new Set(summary.findings.flatMap(({ ranks }) => ranks));
}

function cost(found: Finding): string {
  if (found.cost_ns === null) return "";
  return (found.cost_is_bound ? "≤ " : "") + (found.cost_ns / 1e6).toFixed(2);
}

function share(found: Finding): string {
  return found.share === null ? "" : formatPercent(found.share);
}

/** The steps of a finding, and its start as time of day in UTC. */
export function whenItHolds(found: Finding): string {
  if (found.occurrence) {
    const { steps } = found.occurrence;
    const since = found.since_ns ? `, ${steps.length === 1 ? "" : "from "}${clock(found.since_ns)}` : "";
    return `step${steps.length === 1 ? "" : "s"} ${formatRanks(steps)}${since}`;
  }
  if (found.stretches.length) {
    return found.stretches
      .map(
        ({ first, last, since_ns, until_ns }) =>
          `steps ${first}–${last}${since_ns && until_ns ? `, ${clock(since_ns)} to ${clock(until_ns)}` : ""}`,
      )
      .join("; ");
  }
  if (found.since_step < 0) return "";
  return `since step ${found.since_step}${found.since_ns ? `, ${clock(found.since_ns)}` : ""}`;
}

function clock(epochNs: number): string {
  return utc(new Date(epochNs / 1e6).toISOString());
}

function nothingFound(summary: Summary): string {
  if (!summary.run.steps.count) return "Not judged: no step was recorded in full, so ranks were not compared.";
  const isJudged = summary.findings.every(({ kind }) => kind !== "not_judged");
  return isJudged ? "No rank was found to slow the others down." : "Not judged:";
}
