import type { Overview } from "../data/overview";
import type { Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatClock, formatDuration, joined, utc } from "../format";

const MOST_REPEATED = 10;

export function showHeader(summary: Summary, overview: Overview | null): void {
  const { run } = summary;
  byId("title").textContent = `${run.id}${run.attempt > 0 ? ` · attempt ${run.attempt + 1}` : ""}`;
  const parallel = Object.entries(run.parallel ?? {}).filter(([, size]) => size > 1);
  byId("facts").textContent = joined([
    `${run.world_size} ranks`,
    `${run.hosts.length} ${run.hosts.length === 1 ? "host" : "hosts"}`,
    stepCount(run.steps),
    overview?.terms.begin_utc ? utc(overview.terms.begin_utc) : "",
    summary.run_budget?.wall_ns ? `took ${formatClock(summary.run_budget.wall_ns)}` : "",
    run.framework ? Object.values(run.framework).join(" ") : "",
    parallel.map(([name, size]) => `${name} ${size}`).join(", "),
    run.backend,
    run.device,
  ]);
  byId("notes").append(
    ...repeatedSteps(summary),
    ...summary.problems.map((problem) => element("li", problem.charAt(0).toUpperCase() + problem.slice(1))),
  );
}

function repeatedSteps(summary: Summary): HTMLElement[] {
  return (summary.repeated_steps ?? []).slice(0, MOST_REPEATED).map(({ step, attempts }) => {
    const each = attempts.map(
      (one) =>
        `attempt ${one.attempt} at ${new Date(one.start_ns / 1e6).toLocaleTimeString()}: ${formatDuration(one.duration_ns)}`,
    );
    const text = `Step ${step} was done ${attempts.length} times: ${each.join(", ")}. Shown is the last one of this launch.`;
    return element("li", text);
  });
}

function stepCount({ count, left_out }: Summary["run"]["steps"]): string {
  const others = (left_out ?? []).map((part) => `${part.count} left out: ${part.reason}`);
  return `${count} ${count === 1 ? "step" : "steps"}${others.length ? ` (${others.join("; ")})` : ""}`;
}
