// The JSON resources of the data interface (docs/viewer-data.md). Times are ns.

export interface Residual {
  p50: number;
  p99: number;
  max: number;
}

export interface Lane {
  role: string;
  ranks: number[];
  group: string;
  label: string;
}

export interface Rank {
  rank: number;
  host: string;
  coordinates: Record<string, number>;
  label: string;
  lanes: Lane[];
}

/** What is common to all steps of a timeline: ranks, and the vocabularies that columns index. */
export interface Outline {
  residual_ns: Residual | null;
  kinds: string[];
  states: string[];
  timings: string[];
  roles: string[];
  names: string[];
  ranks: Rank[];
}

export interface StepInfo {
  step: number;
  duration_ns: number;
  note: string;
}

export interface RunData {
  version: number;
  title: string;
  steps: StepInfo[]; // those that the page lists
  critical_kinds: string[]; // of pieces of critical paths
  can_show: number[]; // all that can be shown, ascending
  first_shown: number | null; // a step
  has_plan: boolean;
  note: string;
}

export interface WaitAndTransfer {
  wait: number;
  transfer: number;
}

export interface RankTimes {
  rank: number;
  host: string;
  coordinates: Record<string, number>;
  wall_ns: number;
  compute_ns: number;
  exposed_total_ns: number;
  exposed_ns: Record<string, WaitAndTransfer>;
  hidden_ns: number;
  wait_ns: number;
  blame_ns: number;
  launch_bound_ns: Record<string, number> | null;
  exposed_memory_ns: number;
  bubble_ns: number;
  idle_ns: number;
  replay_ns: number;
  data_ns: number;
  checkpoint_ns: number;
  gc_ns: number;
  between_ns: number;
  other_ns: number;
}

export interface Communication {
  role: string;
  operation: string;
  group_size: number;
  inter_node: boolean | null;
  count: number;
  bytes: number;
  duration_ns: { p50: number; p99: number; max: number };
  durations_are_bounds: boolean;
  algbw_gbps: number | null;
  busbw_gbps: number | null;
  bandwidth_time: string | null;
  bandwidth_is_bound: boolean;
  exposed_ns: number;
  hidden_ns: number;
  wait_ns: number;
  unfinished: number;
  replayed: number;
  upper_bounds: number;
}

export interface PathShare {
  rank: number;
  kind: string;
  role: string;
  ns: number;
}

/** One of the list that every command shows (docs/json/finding.schema.json); epoch times in ns. */
export interface Finding {
  id: string;
  kind: "failed" | "hang" | "mismatch" | "silent" | "slow" | "lost" | "recording" | "not_judged";
  place: string;
  cause: string;
  ranks: number[];
  hosts: string[];
  stretches: { first: number; last: number; since_ns: number | null; until_ns: number | null }[];
  since_step: number;
  since_ns: number | null;
  occurrence: { steps: number[]; total_ns: number; num_steps: number } | null;
  cost_ns: number | null;
  cost_is_bound: boolean;
  share: number | null;
  gpu_hours_per_day: number | null;
  evidence: string;
  advice: string;
  words: string;
  text: string;
}

export interface Awaited {
  rank: number;
  share: number;
  text: string;
  stands_out: boolean;
  because: string;
}

export type StageValue = number | string | number[] | null;

export interface Pipeline {
  schedule: string;
  stages: number;
  chunks: number;
  microbatches: number;
  fraction_of_phase?: { idle: number | null; theoretical_bubble: number | null };
  per_stage?: Record<string, StageValue>[];
}

export interface ModuleTime {
  module: string;
  modules: number;
  calls: number;
  forward_ns: number;
  backward_ns: number;
  recompute_ns: number;
  exposed_ns: number;
  median_step_ns: number;
  p95_step_ns: number;
  slowest_rank: number | null;
  slowest_rank_slower: number | null;
}

/** Wall time of a run by its parts, as `training_ns` and so on. */
export interface RunBudget extends Record<string, unknown> {
  wall_ns: number;
  attempts: number;
  goodput: number | null;
  ranks: Record<string, number>[];
}

/** `commtrace summary --json` (docs/json/summary.schema.json), as far as the page reads it. */
export interface Summary {
  own_cost: { sentence: string } | null; // of recording
  run: {
    id: string;
    attempt: number;
    world_size: number;
    hosts: string[];
    steps: { count: number; left_out: { count: number; reason: string }[] };
    backend: string;
    device: string;
    parallel: Record<string, number>;
    versions: Record<string, string>;
    framework: Record<string, string> | null;
  };
  state: string; // of the job, in words
  verdict: string;
  together_ns: number; // what a step would save without everything that is slow
  problems: string[];
  alignment: {
    method: string;
    observations: number;
    residual_ns: Residual | null;
    hosts: { host: string; offset_ns: number; drift_ppm: number; steps?: unknown[] }[];
  };
  run_budget: RunBudget | null;
  repeated_steps: { step: number; attempts: { attempt: number; start_ns: number; duration_ns: number }[] }[];
  ranks: RankTimes[];
  critical_path: { steps: number; ns: number; uncertain_ns: number; shares: PathShare[] } | null;
  lost_time: ({ gpus: number | null; steps_ns: number; ideal_ns: number } & Record<string, number | null>) | null;
  launch_bound: string;
  awaited: Awaited[];
  communication: Communication[];
  modules: ModuleTime[];
  pipeline: Pipeline | null;
  findings: Finding[];
  coverage: { captured: unknown; dropped: unknown; not_visible: unknown; replays: { sentence: string }[] };
}
