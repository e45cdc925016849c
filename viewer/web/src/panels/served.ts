// What only a page of `commtrace view` has: the list of runs, progress, and the notice that a run has grown.

import type { Progress, ServerSource } from "../data/server";
import { byId, element } from "../dom";
import { formatDuration, formatPercent, utc } from "../format";
import { dataTable } from "../table";

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
  } | null;
  verdict: { text: string } | null;
  problems: string[];
}

/** Shows the runs of the directory, the newest first; each leads to its page. */
export async function showRuns(source: ServerSource, token: string): Promise<void> {
  document.body.classList.add("list-of-runs");
  byId("title").textContent = "commtrace · runs";
  const { runs, path } = (await source.json<{ runs: ListedRun[]; path: string }>("runs.json"))!;
  byId("facts").textContent = path;
  const open = (run: ListedRun) => {
    location.href = `run/${encodeURIComponent(run.directory)}/?token=${encodeURIComponent(token)}`;
  };
  const columns = [
    { heading: "run", text: (run: ListedRun) => run.directory, isWords: true },
    {
      heading: "started",
      text: (run: ListedRun) => (run.facts?.started_utc ? utc(run.facts.started_utc) : "–"),
      isWords: true,
    },
    {
      heading: "duration",
      text: (run: ListedRun) => formatDuration(run.facts?.duration_ns),
      order: (run: ListedRun) => run.facts?.duration_ns ?? 0,
    },
    {
      heading: "ranks",
      text: (run: ListedRun) => String(run.facts?.world_size ?? "–"),
      order: (run: ListedRun) => run.facts?.world_size ?? 0,
    },
    { heading: "state", text: (run: ListedRun) => run.state.replaceAll("_", " "), isWords: true },
    { heading: "verdict", text: (run: ListedRun) => run.verdict?.text ?? run.problems[0] ?? "–", isWords: true },
  ];
  byId("runs").append(dataTable(columns, [...runs].reverse(), open));
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
