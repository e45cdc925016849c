// The mean step of blocks of neighbouring steps, in the shape in which a rank's mean step comes.

import type { Overview } from "../data/overview";
import type { RankTimes, WaitAndTransfer } from "../data/types";

export interface Block {
  first: number; // step numbers, both inclusive
  last: number;
  times: StepTimes;
}

/** What a bar of the breakdown needs, ns per rank and step. */
export type StepTimes = Omit<
  RankTimes,
  "rank" | "host" | "coordinates" | "wait_ns" | "blame_ns" | "hidden_ns" | "launch_bound_ns"
>;

type Part = Exclude<keyof StepTimes, "exposed_ns" | "wall_ns" | "exposed_total_ns">;

const PARTS: Record<string, Part> = {
  compute: "compute_ns",
  "exposed memory": "exposed_memory_ns",
  bubble: "bubble_ns",
  idle: "idle_ns",
  replay: "replay_ns",
  data: "data_ns",
  checkpoint: "checkpoint_ns",
  gc: "gc_ns",
  between: "between_ns",
  other: "other_ns",
};
const EXPOSED: Record<string, keyof WaitAndTransfer> = { "exposed wait": "wait", "exposed transfer": "transfer" };

export function blocksOf({ blocks, terms }: Pick<Overview, "blocks" | "terms">): Block[] {
  const [first, last, count, state, ns] = ["first", "last", "rank_steps", "state", "ns"].map((name) => blocks.of(name));
  const found = new Map<number, Block>();
  for (let row = 0; row < blocks.length; row++) {
    const key = first![row]!;
    const block = found.get(key) ?? { first: key, last: last![row]!, times: nothing() };
    found.set(key, block);
    const { kind, detail } = terms.states[state![row]!]!;
    add(block.times, kind, detail, ns![row]! / count![row]!);
  }
  return [...found.values()];
}

function add(times: StepTimes, kind: string, detail: string, ns: number): void {
  times.wall_ns += ns;
  const exposed = EXPOSED[kind];
  if (exposed) {
    times.exposed_ns[detail] ??= { wait: 0, transfer: 0 };
    times.exposed_ns[detail][exposed] += ns;
    times.exposed_total_ns += ns;
    return;
  }
  const part = PARTS[kind];
  if (!part) throw new Error(`the data have an unknown part of a step: ${kind}`);
  times[part] += ns;
}

function nothing(): StepTimes {
  return {
    wall_ns: 0,
    compute_ns: 0,
    exposed_total_ns: 0,
    exposed_ns: {},
    exposed_memory_ns: 0,
    bubble_ns: 0,
    idle_ns: 0,
    replay_ns: 0,
    data_ns: 0,
    checkpoint_ns: 0,
    gc_ns: 0,
    between_ns: 0,
    other_ns: 0,
  };
}
