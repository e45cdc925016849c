// What a step would take with changes: asked of `commtrace view`, and as a command in a report.

import { labelledSelect } from "../controls";
import { ServerSource } from "../data/server";
import type { Source } from "../data/source";
import type { Summary } from "../data/types";
import { button, byId, element } from "../dom";
import { formatMilliseconds, formatPercent } from "../format";
import { namedRanks } from "./findings";

/** `commtrace whatif --json`, as far as the page reads it, and the name of the predicted step. */
export interface Answer {
  changes: string[];
  fidelity: { measured_ns: number; replayed_ns: number; error: number; is_faithful: boolean };
  predicted_ns: number;
  uncertainty_ns: number;
  throughput_ratio: number;
  assumptions: string[];
  microbatches: number | null;
  recorded_microbatches: number | null;
  drawn: string;
}

const AS_RECORDED = "as recorded";
const SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb1p", "interleaved_zero_bubble"];

/** Shows the section; `draw` puts a predicted step under the recorded one in the timeline. */
export function showWhatIf(
  source: Source,
  summary: Summary,
  draw: (name: string) => Promise<void>,
  showTimeline: () => void,
): void {
  if (!summary.ranks.length) return;
  byId("what-if-section").hidden = false;
  const roles = rolesOf(summary);
  if (source instanceof ServerSource) byId("what-if").append(...form(source, summary, roles, draw, showTimeline));
  else {
    byId("what-if").append(
      element("p", "Predict what a step would take with changes, and draw it beside the recorded one:"),
      element("pre", command(roles[0])),
    );
  }
}

export function command(role: string | undefined): string {
  const change = role === undefined ? "--without-slow-rank all" : `--bandwidth ${role}=2x`;
  return `commtrace whatif RUN ${change} -o whatif.html`;
}

/** Roles with communication between ranks, those with most exposed time first. */
export function rolesOf({ communication }: Pick<Summary, "communication">): string[] {
  const exposed = new Map<string, number>();
  for (const { role, group_size, exposed_ns } of communication) {
    if (group_size !== 1) exposed.set(role, (exposed.get(role) ?? 0) + exposed_ns);
  }
  return [...exposed].toSorted((a, b) => b[1] - a[1]).map(([role]) => role);
}

function form(
  source: ServerSource,
  summary: Summary,
  roles: readonly string[],
  draw: (name: string) => Promise<void>,
  showTimeline: () => void,
): HTMLElement[] {
  const { pipeline } = summary;
  const bandwidth = labelledSelect("what-if-bandwidth", "Bandwidth of", ["no role", ...roles, "all"]);
  const factor = number("what-if-factor", "times", "any");
  factor.node.value = "2";
  const overlap = labelledSelect("what-if-overlap", "Perfect overlap of", ["no role", ...roles, "all"]);
  const ranks = [...namedRanks(summary)].map(String);
  const slow = labelledSelect("what-if-slow", "Slow ranks", [
    AS_RECORDED,
    ...ranks.map((rank) => `rank ${rank} like its peers`),
    ...(ranks.length > 1 ? ["all like their peers"] : []),
  ]);
  const schedule = labelledSelect("what-if-schedule", "Schedule", [AS_RECORDED, ...SCHEDULES]);
  const microbatches = number("what-if-microbatches", "Microbatches", "1");
  microbatches.node.placeholder = pipeline ? String(pipeline.microbatches) : AS_RECORDED;
  const hasPipeline = pipeline !== null && pipeline.stages > 1;

  const query = () => {
    const words = new URLSearchParams();
    if (bandwidth.node.selectedIndex) words.append("bandwidth", `${bandwidth.node.value}=${factor.node.value}x`);
    if (overlap.node.selectedIndex) words.append("overlap", `${overlap.node.value}=perfect`);
    const chosen = slow.node.selectedIndex;
    const removed = chosen > ranks.length ? ranks : ranks.slice(chosen - 1, chosen);
    if (chosen) for (const rank of removed) words.append("without_slow_rank", rank);
    if (schedule.node.selectedIndex) words.append("schedule", schedule.node.value);
    if (microbatches.node.value) words.append("microbatches", microbatches.node.value);
    return words.toString();
  };
  const submit = element("button", "Predict");
  const node = element("form", "", "bar");
  node.append(
    bandwidth.label,
    factor.label,
    overlap.label,
    ...(ranks.length ? [slow.label] : []),
    ...(hasPipeline ? [schedule.label, microbatches.label] : []),
    submit,
  );
  const answer = element("div");
  answer.ariaLive = "polite";
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    answer.replaceChildren(element("p", "Replaying the steps…", "hint"));
    try {
      const response = await source.ask(`whatif?${query()}`, "POST");
      if (!response) throw new Error("this server answers no such question");
      const found = (await response.json()) as Answer;
      answer.replaceChildren(...sentences(found).map((text) => element("p", text)));
      await draw(found.drawn);
      const drawn = "The predicted step is drawn in the timeline under the recorded one (o).";
      answer.append(element("p", drawn, "hint"), button("Show the timeline", drawn, showTimeline));
    } catch (error) {
      answer.replaceChildren(
        element("p", `It cannot be predicted: ${error instanceof Error ? error.message : error}`, "empty"),
      );
    } finally {
      submit.disabled = false;
    }
  });
  const hint = "Other changes, such as latency, layers per stage and recomputation: commtrace whatif RUN --help.";
  return [node, answer, element("p", hint, "hint")];
}

/** How well the replay reproduces the run itself, then the answer, then what it assumes. */
export function sentences(answer: Answer): string[] {
  const { fidelity, predicted_ns: predicted, uncertainty_ns: uncertainty } = answer;
  const measured = fidelity.measured_ns;
  const faithful =
    `The replay of the run itself misses its step of ${formatMilliseconds(measured)} ms by ${formatPercent(Math.abs(fidelity.error))}.` +
    (fidelity.is_faithful ? "" : " That is more than 2 %: read the answer as a direction.");
  if (!answer.changes.length) return [faithful, "Nothing was changed."];
  const saved = (measured - predicted) / measured;
  const more =
    answer.microbatches === answer.recorded_microbatches
      ? ""
      : ` A step has ${answer.microbatches} microbatches instead of ${answer.recorded_microbatches}: ` +
        `${answer.throughput_ratio.toFixed(3)} times as many per second.`;
  return [
    faithful,
    `With ${answer.changes.join("; ")}, a step would take ${formatMilliseconds(predicted)} ± ${formatMilliseconds(uncertainty)} ms: ` +
      `${formatPercent(Math.abs(saved))} ${saved >= 0 ? "less" : "more"}.${more}`,
    ...answer.assumptions.map((assumption) => `Assumed: ${assumption}`),
  ];
}

function number(id: string, name: string, step: string): { label: HTMLElement; node: HTMLInputElement } {
  const label = element("label", `${name} `);
  const node = element("input");
  Object.assign(node, { id, type: "number", step, min: step === "1" ? "1" : "0.01" });
  label.append(node);
  return { label, node };
}
