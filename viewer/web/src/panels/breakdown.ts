import { type Part, stackedBar, swatch } from "../bars";
import type { RankTimes, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatMilliseconds, formatPercent, rankLabel } from "../format";
import { type ColumnOf, dataTable } from "../table";
import type { Theme } from "../theme";

const BY = ["rank", "stage", "host", "replica", "longest step"] as const;
type By = (typeof BY)[number];

const MOST_BARS = 64; // beyond this, the ranks are summed up by stage or host to begin with

interface Bar {
  label: string;
  ranks: RankTimes[];
  times: RankTimes;
}

/** Shows the mean step of ranks, or of groups of them, as stacked bars and as a table. */
export function showBreakdown(summary: Summary, theme: Theme, onRank: (rank: number) => void): void {
  const { ranks, run } = summary;
  const roles = [...new Set(ranks.flatMap((rank) => Object.keys(rank.exposed_ns)))].sort();
  const steps = run.steps.count || 1;
  byId("breakdown-hint").textContent =
    `Mean per step over ${steps} ${steps > 1 ? "steps" : "step"}. The parts of a rank add up to its wall time; ` +
    "what is in no span is shown as other.";
  const labels = new Map(ranks.map((rank) => [rank.rank, rankLabel(rank, run.parallel)]));
  const select = byId<HTMLSelectElement>("breakdown-by");
  select.append(...BY.map((by) => element("option", by)));
  select.value =
    ranks.length > MOST_BARS ? (new Set(ranks.map((rank) => rank.coordinates.pp)).size > 1 ? "stage" : "host") : "rank";
  const show = () => draw(bars(ranks, select.value as By, labels), roles, theme, onRank);
  select.addEventListener("change", show);
  show();
}

function bars(ranks: readonly RankTimes[], by: By, labels: ReadonlyMap<number, string>): Bar[] {
  const single = (rank: RankTimes): Bar => ({
    label: labels.get(rank.rank) ?? `rank ${rank.rank}`,
    ranks: [rank],
    times: rank,
  });
  if (by === "rank") return ranks.map(single);
  if (by === "longest step") return ranks.map(single).sort((a, b) => b.times.wall_ns - a.times.wall_ns);
  const key = (rank: RankTimes) =>
    by === "host"
      ? rank.host
      : by === "stage"
        ? `stage ${rank.coordinates.pp ?? 0}`
        : `replica ${rank.coordinates.dp ?? 0}`;
  const groups = new Map<string, RankTimes[]>();
  for (const rank of ranks) groups.set(key(rank), [...(groups.get(key(rank)) ?? []), rank]);
  const collator = new Intl.Collator("en", { numeric: true });
  return [...groups]
    .sort(([a], [b]) => collator.compare(a, b))
    .map(([label, members]) => ({
      label: `${label} · mean of ${members.length}`,
      ranks: members,
      times: mean(members),
    }));
}

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
  return { ...ranks[0]!, ...numbers, exposed_ns: Object.fromEntries(exposed) };
}

/** The parts of a rank's step in the order in which they are stacked; together they are its wall time. */
export function partsOf(rank: RankTimes, roles: readonly string[], theme: Theme): Part[] {
  const exposed = roles.flatMap((role) => {
    const { wait, transfer } = rank.exposed_ns[role] ?? { wait: 0, transfer: 0 };
    const colour = theme.role(role);
    return [
      { name: `${role} wait`, ns: wait, colour, hatched: true },
      { name: `${role} transfer`, ns: transfer, colour },
    ];
  });
  return [
    { name: "compute", ns: rank.compute_ns, colour: "forward" },
    ...exposed,
    { name: "exposed memory", ns: rank.exposed_memory_ns, colour: "span" },
    { name: "pipeline bubble", ns: rank.bubble_ns, colour: "bubble", hatched: true },
    { name: "idle", ns: rank.idle_ns, colour: "idle" },
    { name: "data", ns: rank.data_ns, colour: "data" },
    { name: "checkpoint", ns: rank.checkpoint_ns, colour: "checkpoint" },
    { name: "gc", ns: rank.gc_ns, colour: "gc" },
    { name: "other", ns: rank.other_ns, colour: "other" },
  ];
}

function draw(shown: readonly Bar[], roles: readonly string[], theme: Theme, onRank: (rank: number) => void): void {
  const longest = Math.max(1, ...shown.map(({ times }) => times.wall_ns));
  const rows = shown.map((bar) => ({ ...bar, parts: partsOf(bar.times, roles, theme) }));
  const somewhere = new Set(rows.flatMap(({ parts }) => parts.filter(({ ns }) => ns > 0).map(({ name }) => name)));
  const present = (rows[0]?.parts ?? []).filter(({ name }) => somewhere.has(name) || name === "other");
  byId("breakdown-legend").replaceChildren(...present.map((part) => swatch(part.colour, part.name, part.hatched)));
  byId("breakdown").replaceChildren(
    ...rows.flatMap(({ label, ranks, times, parts }) => {
      const bar = stackedBar(
        parts,
        longest,
        (part) => `${part.name}: ${formatDuration(part.ns)}, ${formatPercent(part.ns / times.wall_ns)} of the step`,
      );
      const name = element("button", label, "link");
      name.type = "button";
      name.title = "Show this rank in the timeline";
      name.disabled = ranks.length > 1;
      name.addEventListener("click", () => onRank(ranks[0]!.rank));
      return [name, bar, element("span", formatDuration(times.wall_ns))];
    }),
  );
  const value = (row: (typeof rows)[number], name: string) => row.parts.find((part) => part.name === name)?.ns ?? 0;
  const columns: ColumnOf<(typeof rows)[number]>[] = [
    { heading: "rank", text: (row) => row.label, order: (row) => row.ranks[0]!.rank, isWords: true },
    { heading: "wall ms", text: (row) => formatMilliseconds(row.times.wall_ns), order: (row) => row.times.wall_ns },
    ...present.map(({ name }) => ({
      heading: `${name} ms`,
      text: (row: (typeof rows)[number]) => formatMilliseconds(value(row, name)),
      order: (row: (typeof rows)[number]) => value(row, name),
    })),
    {
      heading: "hidden communication ms",
      text: (row) => formatMilliseconds(row.times.hidden_ns),
      order: (row) => row.times.hidden_ns,
    },
  ];
  byId("breakdown-table").replaceChildren(dataTable(columns, rows));
}
