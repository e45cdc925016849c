import type { Pipeline, StageValue, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatMilliseconds, formatPercent, formatRanks, joined } from "../format";
import { dataTable } from "../table";

type Stage = Record<string, StageValue>;

const COLUMNS: readonly (readonly [key: string, heading: string])[] = [
  ["stage", "stage"],
  ["ranks", "ranks"],
  ["forward_ns", "forward"],
  ["backward_ns", "backward"],
  ["bubble_ns", "bubble"],
  ["warm_up_ns", "warm-up"],
  ["steady_ns", "steady"],
  ["cool_down_ns", "cool-down"],
  ["schedule_ns", "schedule"],
  ["imbalance_ns", "imbalance"],
  ["variation_ns", "variation"],
  ["p2p_ns", "P2P"],
];

const ALWAYS_KNOWN = new Set(["stage", "ranks", "forward_ns", "backward_ns"]);

export function showPipeline({ pipeline }: Summary, onRank: (rank: number) => void): void {
  const panel = byId("pipeline");
  if (!pipeline || !(pipeline.stages > 1)) {
    byId("pipeline-section").hidden = true;
    return;
  }
  const stages = pipeline.per_stage ?? [];
  const unsure = stages.some((stage) => !waitsAreKnown(stage));
  panel.append(element("p", sentence(pipeline, unsure)));
  if (!stages.length) return;
  const columns = COLUMNS.filter(([key]) => key in stages[0]!).map(([key, heading]) => ({
    heading,
    text: (stage: Stage) => (waitsAreKnown(stage) || ALWAYS_KNOWN.has(key) ? cell(key, stage[key] ?? null) : "–"),
    order: (stage: Stage) => (Array.isArray(stage[key]) ? (stage[key][0] ?? 0) : Number(stage[key])),
  }));
  panel.append(
    dataTable(
      columns,
      stages,
      (stage) => Array.isArray(stage.ranks) && stage.ranks[0] !== undefined && onRank(stage.ranks[0]),
    ),
    element(
      "p",
      "ms per step; forward and backward: mean ms of one. The bubble by phase (warm-up, steady, cool-down) and by cause: what equal " +
        "stages would wait (schedule), stages that differ (imbalance; negative: a slow stage waits less for the others), " +
        "microbatches and ranks that differ (variation), transfers (P2P)." +
        (unsure ? " –: the other side of these stages' messages is unknown, so their waits are unknown too." : ""),
      "hint",
    ),
  );
}

function sentence(pipeline: Pipeline, unsure: boolean): string {
  const { idle, theoretical_bubble: theoretical } = pipeline.fraction_of_phase ?? {
    idle: null,
    theoretical_bubble: null,
  };
  return joined([
    pipeline.schedule,
    `${pipeline.stages} stages`,
    pipeline.chunks > 1 ? `${pipeline.chunks} chunks per rank` : "",
    `${pipeline.microbatches} microbatches`,
    `idle ${unsure ? "at least " : ""}${formatPercent(idle)} of its phase (first forward to last backward)`,
    typeof theoretical === "number" ? `theoretical ${pipeline.schedule} bubble ${formatPercent(theoretical)}` : "",
  ]);
}

/** With a few exceptions, both sides of the stage's messages were recorded: wait and transfer can be separated. */
function waitsAreKnown(stage: Stage): boolean {
  const value = (name: string) => Number(stage[name] ?? 0);
  return value("unmatched_ns") <= 0.05 * (value("bubble_ns") + value("transfer_ns"));
}

function cell(key: string, value: StageValue): string {
  if (Array.isArray(value)) return formatRanks(value);
  return key.endsWith("_ns") && typeof value === "number" ? formatMilliseconds(value) : String(value ?? "–");
}
