// What only a page of `commtrace view` has: the list of runs, progress, and the notice that a run has grown.

import type { Progress, ServerSource } from "../data/server";
import { byId, element } from "../dom";
import { formatClock, formatDuration, formatPercent, utc } from "../format";
import { type ColumnOf, dataTable } from "../table";

const LOOK_EVERY = 15_000; // ms

/** `commtrace list --json`, as far as the page reads it (docs/json/list.schema.json). */
interface ListedRun {
  directory: string;
  state: string;
  facts: {
    started_utc: string | null;
    duration_ns: number | null;
    world_size: number | null;
    hosts: string[];
    steps: number | null;
    step_ns: number | null;
  } | null;
  verdict: { text: string; named: unknown[] } | null;
  problems: string[];
}

/** By directory, what was found in the runs that this server has read. */
type Read = Record<string, { state: string; text: string }>;

/** Shows the runs of the directory, the newest first; each leads to its page. */
export async function showRuns(source: ServerSource, token: string): Promise<void> {
  document.body.classList.add("list-of-runs");
  byId("title").textContent = "Runs";
  const { runs, path, read } = (await source.json<{ runs: ListedRun[]; path: string; read: Read }>("runs.json"))!;
  byId("facts").textContent = path;
  const open = (run: ListedRun) => {
    location.href = `run/${encodeURIComponent(run.directory)}/?token=${encodeURIComponent(token)}`;
  };
  byId("runs").append(dataTable(columnsOfRuns(read), [...runs].reverse(), open));
}

function columnsOfRuns(read: Read): ColumnOf<ListedRun>[] {
  const words = (heading: string, text: (run: ListedRun) => string) => ({ heading, text, isWords: true });
  const number = (
    heading: string,
    value: (facts: NonNullable<ListedRun["facts"]>) => number | null,
    format: (value: number) => string = String,
  ) => {
    const of = ({ facts }: ListedRun) => (facts ? value(facts) : null);
    return {
      heading,
      text: (run: ListedRun) => (of(run) === null ? "–" : format(of(run)!)),
      order: (run: ListedRun) => of(run) ?? -1,
    };
  };
  return [
    words("run", (run) => run.directory),
    words("state", (run) => read[run.directory]?.state ?? run.state.replaceAll("_", " ")),
    words("verdict", (run) => run.verdict?.text ?? read[run.directory]?.text ?? unread(run)),
    number("step", (facts) => facts.step_ns, formatDuration),
    number("steps", (facts) => facts.steps),
    number("ranks", (facts) => facts.world_size),
    number("hosts", (facts) => facts.hosts.length),
    words("started", ({ facts }) => (facts?.started_utc ? utc(facts.started_utc) : "–")),
    number("took", (facts) => facts.duration_ns, formatClock),
  ];
}

function unread(run: ListedRun): string {
  return run.facts ? "not read yet" : (run.problems[0] ?? "–");
}

/** Offers the way back to the list of runs. */
export function offerList(token: string): void {
  const link = byId<HTMLAnchorElement>("all-runs");
  link.href = `../../?token=${encodeURIComponent(token)}`;
  link.hidden = false;
}

/** Shows what the server is doing; nothing where it has answered. */
export function showProgress(progress: Progress | null): void {
  const line = byId("progress");
  line.hidden = progress === null;
  if (!progress) return;
  const share = progress.of
    ? `: ${progress.done} of ${progress.of} steps, ${formatPercent(progress.done / progress.of)}`
    : "";
  const bar = element("progress");
  if (progress.of) bar.value = progress.done / progress.of;
  line.replaceChildren(bar, element("span", `${progress.text}${share}`));
}

/** Looks now and then whether more was recorded, and offers to read it. */
export function watchGrowth(source: ServerSource): void {
  const timer = setInterval(async () => {
    try {
      const state = await source.ask("state");
      if (!state || !((await state.json()) as { has_grown: boolean }).has_grown) return;
    } catch (error) {
      clearInterval(timer); // once is enough
      throw error;
    }
    clearInterval(timer);
    const again = element("button", "Read it again");
    again.type = "button";
    again.addEventListener("click", async () => {
      await source.ask("read", "POST");
      location.reload();
    });
    byId("grown").replaceChildren(element("span", "More was recorded since this run was read."), again);
    byId("grown").hidden = false;
  }, LOOK_EVERY);
}
