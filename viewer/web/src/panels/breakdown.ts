// The mean step of ranks, of groups of them, or of blocks of steps, as stacked bars and as a table.

import { type Part, stackedBar, swatch } from "../bars";
import type { Overview } from "../data/overview";
import type { RankTimes, Summary } from "../data/types";
import { button, byId, element } from "../dom";
import { formatDuration, formatMilliseconds, formatPercent, rankLabel } from "../format";
import { blocksOf, type StepTimes } from "../overview/blocks";
import { type ColumnOf, dataTable } from "../table";
import type { Theme } from "../theme";
import { namedRanks } from "./findings";

const MOST_RANKS = 64; // beyond this, the ranks are summed up by stage or host to begin with
const MOST_BARS = 200; // so many are shown without asking
const DIMENSIONS: Record<string, string> = {
  pp: "stage",
  dp: "replica",
  tp: "tensor rank",
  cp: "context rank",
  ep: "expert rank",
};
const IN_ORDER = "name";

export interface Bar {
  label: string;
  times: StepTimes;
  hidden_ns: number | null;
  launch_bound_ns: number | null; // the device waited for its host; null if that is not known
  show: (() => void) | null; // leads to the spans behind it
  isNamed?: boolean; // by a finding
}

export interface Leads {
  rank(rank: number): void;
  /** Shows a step; null where it is not in the timeline. */
  step(step: number): (() => void) | null;
  /** Shows the longest stall on a role in the step that is shown. */
  stall(role: string): void;
  /** Searches the step that is shown. */
  find(text: string): void;
}

export function showBreakdown(summary: Summary, overview: Overview | null, theme: Theme, leads: Leads): void {
  const { ranks } = summary;
  const roles = [...new Set(ranks.flatMap((rank) => Object.keys(rank.exposed_ns)))].sort();
  const steps = summary.run.steps.count || 1;
  byId("breakdown-hint").textContent =
    `Mean per step over ${steps} ${steps > 1 ? "steps" : "step"}. The parts of a rank add up to its wall time; ` +
    `what is in no span is shown as other.${summary.launch_bound ? ` ${summary.launch_bound}` : ""}`;
  const ways = waysToGroup(ranks, overview);
  const by = byId<HTMLSelectElement>("breakdown-by");
  by.append(...ways.map((way) => element("option", way)));
  by.value = ranks.length > MOST_RANKS ? (ways.includes("stage") ? "stage" : "host") : "rank";
  const sort = byId<HTMLSelectElement>("breakdown-sort");
  let showAll = false;
  const draw = () => {
    const bars = by.value === "step" && overview ? barsOfSteps(overview, leads) : barsOfRanks(summary, by.value, leads);
    const parts = presentParts(bars, roles, theme);
    const options = [IN_ORDER, "whole", ...parts.map(({ name }) => name)];
    const chosen = options.includes(sort.value) ? sort.value : IN_ORDER;
    sort.replaceChildren(...options.map((name) => element("option", name)));
    sort.value = chosen;
    const ordered = sorted(bars, chosen, roles, theme);
    drawBars(showAll ? ordered : ordered.slice(0, MOST_BARS), ordered.length, parts, roles, theme, () => {
      showAll = true;
      draw();
    });
    const table = byId("breakdown-table");
    const fill = () => table.replaceChildren(tableOf(ordered, parts, roles, theme));
    if (ordered.length <= MOST_RANKS || byId<HTMLDetailsElement>("breakdown-details").open) fill();
    else table.replaceChildren();
  };
  for (const select of [by, sort]) select.addEventListener("change", draw);
  byId("breakdown-details").addEventListener("toggle", () => byId("breakdown-table").childElementCount || draw());
  draw();
}

function waysToGroup(ranks: readonly RankTimes[], overview: Overview | null): string[] {
  const varies = (value: (rank: RankTimes) => unknown) => new Set(ranks.map(value)).size > 1;
  return [
    "rank",
    ...Object.entries(DIMENSIONS)
      .filter(([dimension]) => varies((rank) => rank.coordinates[dimension]))
      .map(([, name]) => name),
    "host",
    ...((overview?.blocks.length ?? 0) > 0 ? ["step"] : []),
  ];
}

export function barsOfRanks(
  { ranks, run, findings }: Pick<Summary, "ranks" | "run" | "findings">,
  by: string,
  leads: Leads,
): Bar[] {
  const named = namedRanks({ findings });
  const single = (rank: RankTimes, label: string): Bar => ({
    label,
    times: rank,
    hidden_ns: rank.hidden_ns,
    launch_bound_ns: rank.launch_bound_ns && Object.values(rank.launch_bound_ns).reduce((sum, ns) => sum + ns, 0),
    show: () => leads.rank(rank.rank),
  });
  const ofRank = (rank: RankTimes): Bar => ({
    ...single(rank, rankLabel(rank, run.parallel)),
    isNamed: named.has(rank.rank),
  });
  if (by === "rank") return ranks.map(ofRank);
  const dimension = Object.entries(DIMENSIONS).find(([, name]) => name === by)?.[0];
  const groups = new Map<string, RankTimes[]>();
  for (const rank of ranks) {
    const key = dimension ? `${by} ${rank.coordinates[dimension] ?? 0}` : rank.host;
    const known = groups.get(key);
    if (known) known.push(rank);
    else groups.set(key, [rank]);
  }
  const collator = new Intl.Collator("en", { numeric: true });
  return [...groups]
    .sort(([a], [b]) => collator.compare(a, b))
    .map(([name, members]) => single(mean(members), `${name} · mean of ${members.length}`));
}

function barsOfSteps(overview: Overview, leads: Leads): Bar[] {
  return blocksOf(overview).map(({ first, last, times }) => ({
    label: first === last ? `step ${first}` : `steps ${first}–${last}`,
    times,
    hidden_ns: null,
    launch_bound_ns: null,
    show: leads.step(first),
  }));
}

/** The mean of ranks, under the first one's number. */
function mean(ranks: readonly RankTimes[]): RankTimes {
  const average = (value: (rank: RankTimes) => number) =>
    ranks.reduce((sum, rank) => sum + value(rank), 0) / ranks.length;
  const roles = new Set(ranks.flatMap((rank) => Object.keys(rank.exposed_ns)));
  const numbers = Object.fromEntries(
    Object.entries(ranks[0]!).flatMap(([name, value]) =>
      typeof value === "number" ? [[name, average((rank) => rank[name as "wall_ns"])]] : [],
    ),
  );
  const exposed = [...roles].map((role) => [
    role,
    {
      wait: average((rank) => rank.exposed_ns[role]?.wait ?? 0),
      transfer: average((rank) => rank.exposed_ns[role]?.transfer ?? 0),
    },
  ]);
  const known = ranks.flatMap(({ launch_bound_ns: phases }) => (phases ? [phases] : []));
  const launchBound = Object.keys(known[0] ?? {}).map((phase) => [
    phase,
    known.reduce((sum, phases) => sum + (phases[phase] ?? 0), 0) / known.length,
  ]);
  return {
    ...ranks[0]!,
    ...numbers,
    rank: ranks[0]!.rank,
    exposed_ns: Object.fromEntries(exposed),
    launch_bound_ns: known.length ? Object.fromEntries(launchBound) : null,
  };
}

/** The parts of a rank's step in the order in which they are stacked; together they are its wall time. */
export function partsOf(times: StepTimes, roles: readonly string[], theme: Pick<Theme, "role">): Part[] {
  const exposed = roles.flatMap((role) => {
    const { wait, transfer } = times.exposed_ns[role] ?? { wait: 0, transfer: 0 };
    const colour = theme.role(role);
    return [
      { name: `${role} wait`, ns: wait, colour, hatched: true },
      { name: `${role} transfer`, ns: transfer, colour },
    ];
  });
  return [
    { name: "compute", ns: times.compute_ns, colour: "compute" },
    ...exposed,
    { name: "exposed memory", ns: times.exposed_memory_ns, colour: "span" },
    { name: "pipeline bubble", ns: times.bubble_ns, colour: "bubble", hatched: true },
    { name: "idle", ns: times.idle_ns, colour: "idle" },
    { name: "replay of graphs", ns: times.replay_ns, colour: "span", hatched: true },
    { name: "data", ns: times.data_ns, colour: "data" },
    { name: "checkpoint", ns: times.checkpoint_ns, colour: "checkpoint" },
    { name: "gc", ns: times.gc_ns, colour: "gc" },
    { name: "between steps", ns: times.between_ns, colour: "idle", hatched: true },
    { name: "other", ns: times.other_ns, colour: "other" },
  ];
}

type Colours = Pick<Theme, "role">;

function presentParts(bars: readonly Bar[], roles: readonly string[], theme: Colours): Part[] {
  const every = bars.map((bar) => partsOf(bar.times, roles, theme));
  return (every[0] ?? []).filter(({ name }, at) => name === "other" || every.some((parts) => parts[at]!.ns > 0));
}

/** Largest first by a part, or by the whole; in their order otherwise. */
export function sorted(bars: readonly Bar[], by: string, roles: readonly string[], theme: Colours): Bar[] {
  if (by === IN_ORDER) return [...bars];
  const value = ({ times }: Bar) => (by === "whole" ? times.wall_ns : partOf(times, by, roles, theme));
  return bars.toSorted((a, b) => value(b) - value(a));
}

function partOf(times: StepTimes, name: string, roles: readonly string[], theme: Colours): number {
  return partsOf(times, roles, theme).find((part) => part.name === name)?.ns ?? 0;
}

function drawBars(
  shown: readonly Bar[],
  count: number,
  parts: readonly Part[],
  roles: readonly string[],
  theme: Colours,
  showAll: () => void,
): void {
  const longest = Math.max(1, ...shown.map(({ times }) => times.wall_ns));
  byId("breakdown-legend").replaceChildren(...parts.map((part) => swatch(part.colour, part.name, part.hatched)));
  byId("breakdown").replaceChildren(
    ...shown.flatMap(({ label, times, show, isNamed }) => {
      const own = partsOf(times, roles, theme);
      const share = (part: Part) => formatPercent(part.ns / times.wall_ns);
      const bar = stackedBar(
        own,
        longest,
        (part) => `${part.name}: ${formatDuration(part.ns)}, ${share(part)} of the step`,
        times.wall_ns,
      );
      bar.role = "img";
      bar.ariaLabel = `${label}: ${own.flatMap((part) => (part.ns > 0 ? [`${part.name} ${share(part)}`] : [])).join(", ")}`;
      const name = button(label, show ? "Show this in the timeline" : "Not in the timeline", () => show?.());
      name.className = isNamed ? "link named" : "link";
      name.disabled = show === null;
      return [name, bar, element("span", formatDuration(times.wall_ns))];
    }),
  );
  const rest = byId("breakdown-rest");
  rest.hidden = count <= shown.length;
  rest.replaceChildren(
    `${shown.length} of ${count.toLocaleString("en-US")} bars are shown. `,
    button(`Show all ${count.toLocaleString("en-US")}`, "Show the bars of all of them", showAll),
  );
}

const launchBoundColumn: ColumnOf<Bar> = {
  heading: "launch-bound ms",
  text: (bar) => (bar.launch_bound_ns === null ? "–" : formatMilliseconds(bar.launch_bound_ns)),
  order: (bar) => bar.launch_bound_ns ?? -1,
};

function tableOf(bars: readonly Bar[], parts: readonly Part[], roles: readonly string[], theme: Colours): HTMLElement {
  const number = (heading: string, value: (bar: Bar) => number): ColumnOf<Bar> => ({
    heading: `${heading} ms`,
    text: (bar) => formatMilliseconds(value(bar)),
    order: value,
  });
  const hidden = bars.some((bar) => bar.hidden_ns !== null);
  const launchBound = bars.some((bar) => bar.launch_bound_ns !== null);
  return dataTable(
    [
      { heading: "of", text: (bar) => bar.label, isWords: true },
      number("wall", (bar) => bar.times.wall_ns),
      ...parts.map(({ name }) => number(name, (bar) => partOf(bar.times, name, roles, theme))),
      ...(hidden ? [number("hidden communication", (bar: Bar) => bar.hidden_ns ?? 0)] : []),
      ...(launchBound ? [launchBoundColumn] : []),
    ],
    bars,
    (bar) => bar.show?.(),
  );
}
