import type { Straggler, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatPercent, utc } from "../format";
import { dataTable } from "../table";

export function showStragglers(summary: Summary, onRank: (rank: number) => void): void {
  const panel = byId("stragglers");
  if (summary.stragglers.length) {
    const table = dataTable(
      [
        { heading: "who", text: (found: Straggler) => found.who, isWords: true },
        { heading: "cause", text: (found) => found.cause.replaceAll("_", " "), isWords: true },
        { heading: "when", text: whenSlow, isWords: true },
        { heading: "cost ms per step", text: cost, order: (found) => found.cost_ms_per_step },
        { heading: "evidence", text: (found) => described(found.evidence), isWords: true },
        { heading: "what to do", text: (found) => found.next_step ?? "", isWords: true },
      ],
      summary.stragglers,
      (found) => onRank(found.members[0]?.rank ?? found.rank),
    );
    panel.append(table);
  } else panel.append(element("p", nothingFound(summary), "empty"));
  const awaited = summary.awaited?.[0];
  if (awaited?.stands_out) {
    const named = stragglingRanks(summary).has(awaited.rank);
    const text = named
      ? `rank ${awaited.rank} (${formatPercent(awaited.share)} of all waiting), named above`
      : awaited.text;
    panel.append(element("p", `Waited for most: ${text}.`, "hint"));
  }
  panel.append(...(summary.abstentions ?? []).map((abstention) => element("p", abstention, "hint")));
}

export function stragglingRanks(summary: Summary): Set<number> {
  return new Set(summary.stragglers.flatMap((found) => [found, ...found.members].map(({ rank }) => rank)));
}

function cost(found: Straggler): string {
  return (
    (found.cost_is_bound ? "≤ " : "") +
    found.cost_ms_per_step.toFixed(2) +
    (found.occurrence ? ` (${found.occurrence})` : "")
  );
}

/** The steps of a finding, and its start as time of day in UTC. */
function whenSlow(found: Straggler): string {
  if (!found.stretches.length)
    return `since step ${found.since_step}${found.since_utc ? `, ${utc(found.since_utc)}` : ""}`;
  return found.stretches
    .map(
      ({ first, last, since_utc, until_utc }) =>
        `steps ${first}–${last}${since_utc && until_utc ? `, ${utc(since_utc)} to ${utc(until_utc)}` : ""}`,
    )
    .join("; ");
}

function nothingFound(summary: Summary): string {
  if (!summary.run.steps.count) return "Not judged: no step was recorded in full, so ranks were not compared.";
  return summary.abstentions?.length ? "Not judged:" : "No rank was found to slow the others down.";
}

/** A value of the summary as text: nested parts as `name: value; name: value`. */
export function described(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value !== "object") return String(value);
  return Object.entries(value)
    .map(([name, part]) => `${name.replaceAll("_", " ")}: ${described(part)}`)
    .join("; ");
}
