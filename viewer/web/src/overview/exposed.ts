// Exposed communication by role, and how much shorter the step would be at most without its transfers.

import type { Summary } from "../data/types";

export interface ExposedRole {
  role: string;
  wait: number; // ns per step, mean of the ranks
  transfer: number;
  hidden: number; // in flight without a stall
  saved: number | null; // at most, if its transfers took no time, ns per step; null if the critical path is unknown
}

export function exposedRoles({
  ranks,
  communication,
  critical_path: path,
  run,
}: Pick<Summary, "ranks" | "communication" | "critical_path" | "run">): ExposedRole[] {
  const names = new Set(ranks.flatMap((rank) => Object.keys(rank.exposed_ns)));
  for (const row of communication) if (row.hidden_ns) names.add(row.role);
  const mean = (value: (rank: (typeof ranks)[number]) => number) =>
    ranks.reduce((sum, rank) => sum + value(rank), 0) / Math.max(ranks.length, 1);
  const stepsOfRanks = Math.max(ranks.length * run.steps.count, 1);
  const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
  return [...names]
    .map((role) => ({
      role,
      wait: mean((rank) => rank.exposed_ns[role]?.wait ?? 0),
      transfer: mean((rank) => rank.exposed_ns[role]?.transfer ?? 0),
      hidden: sum(communication.filter((row) => row.role === role).map((row) => row.hidden_ns)) / stepsOfRanks,
      saved: path?.ns
        ? sum(path.shares.filter((one) => one.role === role && one.kind === "transfer").map((one) => one.ns)) /
          path.steps
        : null,
    }))
    .sort((a, b) => b.wait + b.transfer - (a.wait + a.transfer));
}
