import type { Summary } from "../data/types";
import { byId } from "../dom";
import { formatDuration, joined } from "../format";
import { dataTable } from "../table";

export function showCoverage({ alignment, coverage, own_cost: cost, run }: Summary): void {
  const residual = alignment.residual_ns;
  const versions = Object.entries(run.versions ?? {}).map(([name, version]) => `${name} ${version}`);
  const spread = residual
    ? `residual p50 ${formatDuration(residual.p50)}, p99 ${formatDuration(residual.p99)}, max ${formatDuration(residual.max)}`
    : "";
  const rows: [string, string][] = [
    ["clock alignment", joined([alignment.method, `${alignment.observations} observations`, spread])],
    ["captured", described(coverage.captured)],
    ["dropped", described(coverage.dropped) || "nothing"],
    [
      "not visible",
      Array.isArray(coverage.not_visible) ? coverage.not_visible.join("; ") || "–" : described(coverage.not_visible),
    ],
    ...(cost ? [["cost of recording", cost.sentence] as [string, string]] : []),
    ...coverage.replays.map(({ sentence }): [string, string] => ["CUDA graphs", sentence]),
    ["versions", versions.join(", ") || "–"],
  ];
  byId("coverage").append(
    dataTable(
      [
        { heading: "what", text: ([name]) => name, isWords: true },
        { heading: "value", text: ([, value]) => value, isWords: true },
      ],
      rows,
    ),
  );
}

/** A value of the summary as text: nested parts as `name: value; name: value`. */
function described(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value !== "object") return String(value);
  return Object.entries(value)
    .map(([name, part]) => `${name.replaceAll("_", " ")}: ${described(part)}`)
    .join("; ");
}
