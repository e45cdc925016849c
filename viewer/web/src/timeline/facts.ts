// What a box is, in words: for the tooltip, the details and the search.

import { formatBytes, formatDuration, formatRanks } from "../format";
import type { Box, Step } from "./step";

export type Fact = readonly [term: string, value: string];

export function kindOf(step: Step, box: Box): string {
  if (box.table === "communication") return "communication";
  if (box.table === "stalls") return step.outline.states[step.value(box, "state")] ?? "";
  return step.outline.kinds[step.value(box, "kind")] ?? "";
}

export function nameOf(step: Step, box: Box): string {
  return box.table === "stalls" ? "" : (step.outline.names[step.value(box, "name")] ?? "");
}

/** Whether a span is the part of a backward that computes the gradients of weights, by its name. */
export function isWeightGradient(name: string): boolean {
  return /wgrad|weight/.test(name);
}

/** How far the clocks of two hosts may differ, ns: of what is shorter, it is uncertain on which host it began first. */
export function residualOf(step: Step): number {
  return step.outline.residual_ns?.p99 ?? 0;
}

export function stallName(step: Step, stall: Box): string {
  const role = step.outline.roles[step.value(stall, "role")];
  const state = kindOf(step, stall);
  return state === "wait" ? `wait for ${role}` : state === "transfer" ? `transfer on ${role}` : "pipeline bubble";
}

export function headline(step: Step, box: Box): string {
  if (box.table === "stalls") return stallName(step, box);
  if (box.table === "communication") {
    return `${nameOf(step, box)} · ${laneOf(step, box).role}`;
  }
  const [kind, name] = [kindOf(step, box), nameOf(step, box)];
  return name && name !== kind ? `${kind} · ${name}` : kind;
}

function lengthOf(step: Step, box: Box): string {
  return formatDuration(step.value(box, "duration"));
}

/** Whether the start or the end of a box is known exactly; those of a communication may be bounds. */
function isExact(step: Step, box: Box, which: "start" | "end" | "transfer"): boolean {
  return box.table !== "communication" || step.value(box, `${which}_exact`) === 1;
}

function atMost(isExact: boolean): string {
  return isExact ? "" : "at most ";
}

export function facts(step: Step, box: Box): Fact[] {
  const found: Fact[] = [
    ["rank", step.outline.ranks[box.rank]!.label],
    ["duration", atMost(isExact(step, box, "start") && isExact(step, box, "end")) + lengthOf(step, box)],
    [
      "from",
      `${isExact(step, box, "start") ? "" : "at the earliest "}${formatDuration(step.start(box))} after the step began`,
    ],
  ];
  for (const name of ["microbatch", "stage", "chunk"]) {
    const value = step.optional(box, name);
    if (value >= 0) found.push([name, String(value)]);
  }
  if (step.value(box, "duration") < residualOf(step)) {
    const residual = formatDuration(residualOf(step));
    found.push(["order", `uncertain against other hosts: it is shorter than the clock residual of ${residual}`]);
  }
  const communication = step.communicationOf(box);
  if (communication) found.push(...communicationFacts(step, communication, box.table === "stalls"));
  return found;
}

function laneOf(step: Step, communication: Box) {
  return step.outline.ranks[communication.rank]!.lanes[step.value(communication, "lane")]!;
}

function communicationFacts(step: Step, box: Box, named: boolean): Fact[] {
  const lane = laneOf(step, box);
  const residual = residualOf(step);
  const found: Fact[] = named ? [["waits for", `${nameOf(step, box)} · ${lane.role}`]] : [];
  found.push(["bytes", formatBytes(step.value(box, "bytes"))]);
  const peer = step.value(box, "peer");
  if (peer >= 0) found.push(["peer", `rank ${peer}`]);
  found.push(["group", `${formatRanks(lane.ranks)} (seq ${step.value(box, "seq")})`]);
  const wait = step.value(box, "wait");
  const transfer = step.value(box, "transfer");
  if (transfer < 0) {
    found.push(["wait", "not known: the other ranks' part was not recorded"]);
  } else {
    const uncertain = wait > 0 && wait < residual;
    const known = uncertain ? `below the clock residual of ${formatDuration(residual)}` : formatDuration(wait);
    found.push(["wait", wait < 0 ? "not known: its start is a bound" : known]);
    found.push(["transfer", atMost(isExact(step, box, "transfer")) + formatDuration(transfer)]);
  }
  if (!isExact(step, box, "start")) found.push(["start", "a lower bound: launched behind another one in flight"]);
  if (!isExact(step, box, "end")) found.push(["end", "an upper bound: nothing waited for it"]);
  if (!step.value(box, "finished")) found.push(["end", "never seen: its duration is not known"]);
  if (step.value(box, "is_async")) found.push(["async", "yes"]);
  found.push(["timing", step.outline.timings[step.value(box, "timing")] ?? ""]);
  return found;
}
