// What the run should hold and send by the sizes that it recorded, beside what it sent.

import { barOf, type Piece, swatch } from "../bars";
import type { Source } from "../data/source";
import type { Pipeline, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatBytes, formatMemory, formatPercent, formatRanks } from "../format";
import { type ColumnOf, dataTable } from "../table";

/** A role and operation, on each of some ranks in one step: a row of `commtrace plan --against RUN --json`. */
interface Row {
  ranks: number[];
  role: string;
  operation: string;
  expected_count: number;
  measured_count: number;
  expected_bytes: number;
  measured_bytes: number | null;
  verdict: "same" | "explained" | "different";
  reason: string;
}

interface Memory {
  parameters_bytes: number;
  gradients_bytes: number;
  optimizer_bytes: number;
  activations_bytes: number;
  peak_bytes: number;
}

export interface StageMemory {
  stage: number;
  ranks: number[];
  memory: Memory;
}

/** The peak that ranks recorded. */
interface Peak {
  ranks: number[];
  fullest_rank: number;
  measured_bytes: number;
  reserved_bytes: number;
  reason: string;
}

/** The resource `expected.json`. */
interface Expected {
  verdict: string;
  memory: Peak[]; // of ranks that train on a GPU
  rows: Row[];
  steps: number[];
  notes: string[];
  bubble: { fraction_of_step: number } | null; // null where only communication can be planned
  stages: StageMemory[];
}

const PARTS = [
  ["parameters", "parameters_bytes", "useful"],
  ["gradients", "gradients_bytes", "backward"],
  ["optimizer", "optimizer_bytes", "optimizer"],
  ["activations", "activations_bytes", "tp"],
] as const;

const WORST_LAST: readonly Row["verdict"][] = ["same", "explained", "different"];

/** Shows the section; without recorded sizes it stays away. */
export async function showExpected(
  source: Source,
  { pipeline }: Summary,
  onRank: (rank: number) => void,
): Promise<void> {
  const expected = await source.json<Expected | { problem: string }>("expected.json");
  if (!expected) return;
  byId("expected-section").hidden = false;
  const panel = byId("expected");
  if ("problem" in expected) {
    panel.append(element("p", `It cannot be planned: ${expected.problem}`, "empty"));
    return;
  }
  const { verdict, rows, stages, notes, bubble, steps, memory: peaks } = expected;
  panel.append(element("p", verdict));
  panel.append(...notes.map((note) => element("p", note, "hint")));
  const which = `${steps.length === 1 ? "step" : "steps"} ${formatRanks(steps)}`;
  panel.append(
    element("h3", `Communication of each rank in one step, as in ${which}`),
    communication(rows, onRank),
    element(
      "p",
      "Planned from the sizes that the run recorded; bytes are of full tensors. The same for another plan: " +
        "commtrace plan --against RUN -- COMMAND.",
      "hint",
    ),
  );
  if (stages.length || peaks.length)
    panel.append(element("h3", "Memory of each GPU at its peak"), ...memory(stages, peaks));
  if (bubble && stages.length > 1) {
    panel.append(element("h3", "Pipeline bubble"), element("p", bubbleText(bubble.fraction_of_step, pipeline)));
  }
}

function communication(rows: readonly Row[], onRank: (rank: number) => void): HTMLElement {
  const number = (heading: string, value: (row: Row) => number | null, text: (row: Row) => string): ColumnOf<Row> => ({
    heading,
    text,
    order: (row) => value(row) ?? -1,
  });
  return dataTable<Row>(
    [
      { heading: "ranks", text: ({ ranks }) => formatRanks(ranks), isWords: true },
      { heading: "role", text: ({ role }) => role, isWords: true },
      { heading: "operation", text: ({ operation }) => operation, isWords: true },
      number(
        "planned",
        (row) => row.expected_count,
        (row) => String(row.expected_count),
      ),
      number(
        "sent",
        (row) => row.measured_count,
        (row) => String(row.measured_count),
      ),
      number(
        "bytes planned",
        (row) => row.expected_bytes,
        (row) => formatBytes(row.expected_bytes),
      ),
      number(
        "bytes sent",
        (row) => row.measured_bytes,
        (row) => formatBytes(row.measured_bytes),
      ),
      {
        heading: "beside the plan",
        text: ({ verdict }) => verdict,
        order: ({ verdict }) => WORST_LAST.indexOf(verdict),
        isWords: true,
      },
      ...(rows.some(({ reason }) => reason)
        ? [{ heading: "why", text: ({ reason }: Row) => reason, isWords: true }]
        : []),
    ],
    rows.toSorted((a, b) => WORST_LAST.indexOf(b.verdict) - WORST_LAST.indexOf(a.verdict)),
    ({ ranks }) => ranks[0] !== undefined && onRank(ranks[0]),
  );
}

/** Bars of the planned parts, and under each the recorded peak of its fullest rank, all on one scale. */
function memory(stages: readonly StageMemory[], peaks: readonly Peak[]): HTMLElement[] {
  const legend = element("div", "", "legend");
  if (stages.length) legend.append(...PARTS.map(([name, , colour]) => swatch(colour, name)));
  if (peaks.length) legend.append(swatch("role", "recorded peak"));
  const bars = element("div", "", "breakdown");
  const sizes = [...stages.map(({ memory }) => memory.peak_bytes), ...peaks.map((peak) => peak.measured_bytes)];
  const most = Math.max(1, ...sizes);
  const add = (name: string, pieces: Piece[], whole: number) => {
    const bar = barOf(pieces, most);
    bar.role = "img";
    bar.ariaLabel = pieces.map(({ title }) => title).join("; ");
    bars.append(element("span", name), bar, element("span", formatMemory(whole)));
  };
  const addPeak = (peak: Peak) => {
    const { fullest_rank: rank, measured_bytes: size, reserved_bytes: reserved } = peak;
    const title = `recorded peak: ${formatMemory(size)}, reserved ${formatMemory(reserved)}`;
    add(`recorded on rank ${rank}`, [{ size, colour: "role", title }], size);
  };
  const left = new Set(peaks);
  for (const { stage, ranks, memory } of stages) {
    const pieces = PARTS.map(([name, key, colour]) => ({
      size: memory[key],
      colour,
      title: `${name}: ${formatMemory(memory[key])}`,
    }));
    add(`stage ${stage} · ranks ${formatRanks(ranks)}`, pieces, memory.peak_bytes);
    const known = new Set(ranks);
    for (const peak of left) {
      if (!known.has(peak.fullest_rank)) continue;
      addPeak(peak);
      left.delete(peak);
    }
  }
  left.forEach(addPeak);
  const reasons = peaks
    .filter(({ reason }) => reason)
    .map(({ ranks, reason }) => element("p", `Ranks ${formatRanks(ranks)}: ${reason}`));
  const hint = element(
    "p",
    (stages.length ? "Not in the plan: the CUDA context, NCCL's buffers, workspaces and fragmentation. " : "") +
      (peaks.length
        ? "Recorded: what torch's allocator held for tensors at most, on the fullest rank."
        : "No rank recorded a peak; ranks that train on a CUDA or ROCm device do."),
    "hint",
  );
  return [legend, bars, ...reasons, hint, ...(stages.length ? [memoryTable(stages)] : [])];
}

function memoryTable(stages: readonly StageMemory[]): HTMLElement {
  const part = (heading: string, key: keyof Memory): ColumnOf<StageMemory> => ({
    heading,
    text: ({ memory }) => formatMemory(memory[key]),
    order: ({ memory }) => memory[key],
  });
  const details = element("details");
  details.append(
    element("summary", "The same as a table"),
    dataTable<StageMemory>(
      [
        { heading: "stage", text: ({ stage }) => String(stage), order: ({ stage }) => stage },
        ...PARTS.map(([name, key]) => part(name, key)),
        part("peak", "peak_bytes"),
      ],
      stages,
    ),
  );
  return details;
}

export function bubbleText(ideal: number, pipeline: Pipeline | null): string {
  const idle = pipeline?.fraction_of_phase?.idle;
  const measured =
    typeof idle === "number"
      ? `the run was idle for ${formatPercent(idle)} of it`
      : "how long the run was idle in it is not known";
  return `Ideal: ${formatPercent(ideal)} of the time from the first forward to the last backward; ${measured}.`;
}
