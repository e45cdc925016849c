// What makes numbers doubtful: lost spans, clocks, differences between ranks, failures, and hangs with their stacks.

import type { Source } from "../data/source";
import type { Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatRanks, utc } from "../format";
import { dataTable } from "../table";

/** The resource `health.json`. */
export interface Health {
  differing: { kind: string; name: string; values: { value: string | null; ranks: number[] }[] }[];
  dropped: { rank: number; kinds: Record<string, number> }[];
  failed: { rank: number; exception: string; frames: string[] }[];
  hangs: {
    ranks: number[];
    utc: string;
    no_progress_ns: number;
    in_flight: string[];
    threads: { thread: string; frames: string[] }[];
  }[];
  problems: string[];
}

const MOST_OPEN = 4; // stacks that are shown without a click

export async function showHealth(source: Source, { alignment, findings }: Summary): Promise<void> {
  const panel = byId("coverage");
  if (alignment.hosts.length > 1) panel.append(element("h3", "Clocks of the hosts"), clocks(alignment));
  const health = await source.json<Health>("health.json");
  if (!health) return;
  if (health.dropped.length) panel.append(element("h3", "Spans that were lost"), dropped(health));
  if (health.differing.length) panel.append(element("h3", "Not the same on all ranks"), differing(health));
  const stops = byId("stops");
  if (health.failed.length) stops.append(element("h3", "Exceptions that ended ranks"), ...health.failed.map(failure));
  const awaited = new Set(findings.filter(({ kind }) => kind === "hang").flatMap(({ ranks }) => ranks));
  const isAwaited = ({ ranks }: Health["hangs"][number]) => ranks.some((rank) => awaited.has(rank));
  const hangs = [...health.hangs].sort((a, b) => Number(isAwaited(b)) - Number(isAwaited(a)));
  if (hangs.length) {
    const nodes = hangs.map((one) => hang(one, isAwaited(one)));
    stops.append(element("h3", "Ranks that made no progress"), ...nodes);
  }
  byId("stops-section").hidden = !stops.childElementCount;
  const stacks = stops.querySelectorAll("details");
  for (const node of stacks) node.open = stacks.length <= MOST_OPEN;
  panel.append(...health.problems.map((problem) => element("p", problem, "hint")));
}

function clocks({ hosts, residual_ns: residual }: Summary["alignment"]): HTMLElement {
  const holder = element("div");
  holder.append(
    dataTable(
      [
        { heading: "host", text: ({ host }) => host, isWords: true },
        { heading: "offset", text: (one) => formatDuration(one.offset_ns), order: (one) => one.offset_ns },
        { heading: "drift ppm", text: (one) => one.drift_ppm.toFixed(3), order: (one) => one.drift_ppm },
        { heading: "was set", text: ({ steps }) => (steps?.length ? `${steps.length} times` : "") },
      ],
      hosts,
    ),
    element(
      "p",
      residual
        ? "Compared with the first host. Monotonic clocks count from the start of their host, so offsets may be large; they are corrected. What is left " +
            `is the residual: ${formatDuration(residual.p99)} (p99).`
        : "These clocks could not be aligned.",
      "hint",
    ),
  );
  return holder;
}

function dropped({ dropped: ranks }: Health): HTMLElement {
  const all = ({ kinds }: Health["dropped"][number]) => Object.values(kinds).reduce((sum, one) => sum + one, 0);
  return dataTable(
    [
      { heading: "rank", text: ({ rank }) => String(rank), order: ({ rank }) => rank },
      { heading: "spans", text: (one) => String(all(one)), order: all },
      {
        heading: "kinds",
        text: ({ kinds }) =>
          Object.entries(kinds)
            .map(([kind, count]) => `${count} ${kind}`)
            .join(", "),
        isWords: true,
      },
    ],
    [...ranks].sort((a, b) => all(b) - all(a)),
  );
}

function differing(health: Health): HTMLElement {
  const rows = health.differing.flatMap(({ kind, name, values }) => values.map((one) => ({ kind, name, ...one })));
  return dataTable(
    [
      { heading: "what", text: ({ kind, name }) => `${kind} ${name}`, isWords: true },
      { heading: "value", text: ({ value }) => value ?? "not set", isWords: true },
      { heading: "ranks", text: ({ ranks }) => formatRanks(ranks), order: ({ ranks }) => ranks.length, isWords: true },
    ],
    rows,
  );
}

function failure({ rank, exception, frames }: Health["failed"][number]): HTMLElement {
  return details(`rank ${rank}: ${exception}`, [["innermost call first", frames]]);
}

function hang(one: Health["hangs"][number], isAwaited: boolean): HTMLElement {
  const what = one.in_flight[0] ? `, in ${one.in_flight[0]}` : "";
  const title =
    `${one.ranks.length > 1 ? "ranks" : "rank"} ${formatRanks(one.ranks)}${what}: no progress for ` +
    `${formatDuration(one.no_progress_ns)}, ${utc(one.utc)}${isAwaited ? "; the others wait for it" : ""}`;
  const threads = [...one.threads].sort((a, b) => place(a.thread) - place(b.thread));
  return details(
    title,
    threads.map(({ thread, frames }) => [thread, frames]),
  );
}

/** The thread that trains comes first, and those of commtrace last. */
function place(thread: string): number {
  return thread === "MainThread" ? 0 : thread.startsWith("commtrace") ? 2 : 1;
}

function details(title: string, stacks: (readonly [name: string, frames: readonly string[]])[]): HTMLElement {
  const node = element("details");
  node.append(element("summary", title));
  for (const [name, frames] of stacks) {
    node.append(element("p", name, "hint"), element("pre", frames.join("\n") || "nothing of Python"));
  }
  return node;
}
