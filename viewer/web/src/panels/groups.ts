// Process groups: members, traffic, distribution of bandwidth, and which rank came last.

import type { Source } from "../data/source";
import { byId, element } from "../dom";
import { formatBandwidth, formatBytes, formatDuration, formatPercent, formatRanks } from "../format";
import type { Group, GroupCall, Groups } from "../network/matrix";
import { type ColumnOf, dataTable } from "../table";

const MOST_ROWS = 2000;

interface Row extends GroupCall {
  of: Group;
}

export async function showGroups(source: Source, onRank: (rank: number) => void): Promise<void> {
  const groups = await source.json<Groups>("groups.json");
  if (!groups?.calls.length) return;
  const all = groups.calls.map((call): Row => ({ ...call, of: groups.groups[call.group]! }));
  const rows = all.filter(({ of }) => of.ranks.length > 1).sort((a, b) => b.exposed_ns - a.exposed_ns);
  if (!rows.length) return;
  const shown = rows.slice(0, MOST_ROWS);
  const quantile = (heading: string, index: 0 | 2 | 4): ColumnOf<Row> => ({
    heading,
    isMinor: true,
    text: ({ quantiles_gbps: gbps }) => formatBandwidth(gbps?.[index]),
    order: ({ quantiles_gbps: gbps }) => gbps?.[index] ?? -1,
  });
  byId("groups").append(
    dataTable<Row>(
      [
        { heading: "role", text: ({ of }) => of.role, isWords: true },
        { heading: "operation", text: ({ operation }) => operation, isWords: true },
        { heading: "members", text: ({ of }) => formatRanks(of.ranks), isWords: true },
        { heading: "nodes", text: ({ of }) => reach(of), isWords: true, isMinor: true },
        { heading: "calls", text: ({ count }) => String(count), order: ({ count }) => count },
        { heading: "bytes", text: ({ bytes }) => formatBytes(bytes), order: ({ bytes }) => bytes ?? -1 },
        {
          heading: "busbw",
          text: ({ busbw_gbps: gbps, bandwidth_time: time, bandwidth_is_bound: isBound }) =>
            (isBound ? "≥" : "") + formatBandwidth(gbps) + (time === "duration" ? "*" : ""),
          order: ({ busbw_gbps: gbps }) => gbps ?? -1,
        },
        quantile("p1", 0),
        quantile("median", 2),
        quantile("p99", 4),
        { heading: "exposed", text: (row) => formatDuration(row.exposed_ns), order: (row) => row.exposed_ns },
        { heading: "wait", text: (row) => formatDuration(row.wait_ns), order: (row) => row.wait_ns ?? -1 },
        { heading: "came last most often", text: lastText, order: mostLast, isWords: true },
      ],
      shown,
      ({ of }) => onRank(of.last[0]?.rank ?? of.ranks[0]!),
    ),
    element(
      "p",
      "Calls, bytes, exposed and wait are sums over the members and all steps, busbw is that of all calls; p1, median and p99 are of single calls of at least 1 MiB. " +
        "A rank came last where it began later than all others by more than the clocks are wrong; of all operations of the group." +
        (rows.some((row) => row.bandwidth_time === "duration")
          ? " * not matched on all members: waiting included."
          : "") +
        (rows.some((row) => row.bandwidth_is_bound)
          ? " ≥ most bytes are in calls without an exact start and end."
          : "") +
        (all.length > rows.length ? " Groups of one rank send nothing and are left out." : "") +
        (rows.length > shown.length ? ` The ${MOST_ROWS} most exposed of ${rows.length} rows are shown.` : ""),
      "hint",
    ),
  );
  byId("groups-section").hidden = false;
}

function reach({ inter_node }: Group): string {
  return inter_node === null ? "–" : inter_node ? "between" : "within";
}

function mostLast({ of }: Row): number {
  return of.compared ? (of.last[0]?.times ?? 0) / of.compared : -1;
}

function lastText({ of }: Row): string {
  if (!of.compared) return "–";
  const named = of.last
    .filter(({ times }) => times > 0)
    .map(
      ({ rank, times, wait_ns }) => `rank ${rank}: ${formatPercent(times / of.compared)}, ${formatDuration(wait_ns)}`,
    );
  return named.length ? `${named.join("; ")} (of ${of.compared})` : `none clearly (of ${of.compared})`;
}
