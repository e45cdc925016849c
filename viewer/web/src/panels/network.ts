// Traffic between nodes and between ranks as a matrix, slow links, and the process groups.

import { labelledSelect } from "../controls";
import type { Source } from "../data/source";
import type { Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatBandwidth, formatBytes } from "../format";
import { type HeatCells, HeatMap, heatLegend } from "../heat_map/heat_map";
import {
  ALL,
  besideSimilar,
  type Flow,
  type Groups,
  matrix,
  partsOfNodes,
  partsOfRanks,
  trafficKinds,
} from "../network/matrix";
import { type ColumnOf, dataTable } from "../table";
import type { Theme } from "../theme";

const MOST_PARTS = 128;
const SIMILAR = "bandwidth compared with similar pairs";
const NOT_SLOW = 0.5; // of similar links: one that carries more is none of the slow ones

interface Link {
  operation: string;
  group_size: number;
  bytes_from: number;
  bytes_to: number;
  source: string;
  target: string;
  count: number;
  gbps: number;
  usual_gbps: number | null;
  is_slow: boolean;
}

export async function showNetwork(
  summary: Summary,
  source: Source,
  theme: Theme,
  onRank: (rank: number) => void,
): Promise<void> {
  const [groups, links, messages] = await Promise.all([
    source.json<Groups>("groups.json"),
    source.json<{ links: Link[] }>("links.json"),
    source.table("messages"),
  ]);
  if (!groups?.calls.length || !links || !messages) return;
  const panel = byId("network");
  const nodes = partsOfNodes(summary.ranks);
  const ranks = partsOfRanks(summary.ranks, MOST_PARTS);
  const between = labelledSelect("network-between", "Between", nodes.length > 1 ? ["nodes", "ranks"] : ["ranks"]);
  const all = matrix(ranks, groups, messages, ALL);
  const isKnown = { speed: all.some((flow) => flow?.gbps != null), bytes: all.some((flow) => flow?.bytes) };
  const colours = labelledSelect("network-colours", "Colours", [
    ...(isKnown.speed ? [SIMILAR, "bandwidth"] : []),
    ...(isKnown.bytes ? ["bytes"] : []),
  ]);
  const traffic = labelledSelect("network-traffic", "Traffic", trafficKinds(groups, messages));
  const heat = new HeatMap(theme);
  const legend = element("div", "", "legend");
  const show = () => {
    const parts = between.node.value === "nodes" ? nodes.slice(0, MOST_PARTS) : ranks;
    const names = parts.map(({ name }) => name);
    const flows = matrix(parts, groups, messages, traffic.node.value);
    const by = colours.node.value;
    const values =
      by === SIMILAR
        ? besideSimilar(parts, flows)
        : flows.map((flow) => (by === "bytes" ? flow?.bytes : flow?.gbps) ?? null);
    const known = values.filter((value) => value !== null);
    const [lowest, highest] = [Math.min(...known), Math.max(...known, 1e-9)];
    const cells: HeatCells = {
      rows: names,
      columns: names,
      values,
      range:
        by === "bytes"
          ? [0, highest]
          : by === SIMILAR
            ? [Math.min(lowest, NOT_SLOW), 1]
            : [Math.min(lowest, 0.95 * highest), highest],
      lowIsStrong: by !== "bytes",
      format:
        by === "bytes" ? formatBytes : by === SIMILAR ? (share) => `${(100 * share).toFixed(0)} %` : formatBandwidth,
      describe: (index) => {
        const [from, to] = [Math.floor(index / parts.length), index % parts.length];
        return described(flows[index] ?? null, names[from]!, names[to]!);
      },
      onGo: (index) => onRank(parts[Math.floor(index / parts.length)]!.ranks[0]!),
    };
    heat.show(cells, `${by} from each of the ${between.node.value} to each other`);
    legend.replaceChildren(...heatLegend(cells));
  };
  for (const { node } of [between, colours, traffic]) node.addEventListener("change", show);
  const bar = element("div", "", "bar");
  bar.append(between.label, colours.label, traffic.label);
  if (isKnown.bytes) panel.append(bar, legend, heat.node);
  else panel.append(element("p", "The bytes of the communications are not known.", "empty"));
  if (nodes.length > MOST_PARTS) panel.append(element("p", `The first ${MOST_PARTS} nodes are shown.`, "hint"));
  panel.append(
    element(
      "p",
      "Rows send, columns receive. The bytes of a collective are spread evenly over the pairs of its group. Bandwidth is that of calls of at " +
        `least 1 MiB, after the last member had arrived: of messages, or the slowest median busbw of a group (${ALL}: of any). Similar pairs have the same traffic, within a node or between nodes; 100 % is their median.`,
      "hint",
    ),
    element("h3", "Links between nodes, slowest first, compared with similar ones"),
    linksTable(links.links),
  );
  byId("network-section").hidden = false;
  show();
}

function described(flow: Flow | null, from: string, to: string): string[] {
  const place = from === to ? `within ${from}` : `${from} to ${to}`;
  if (!flow) return ["nothing", place];
  const speed =
    flow.gbps === null
      ? "bandwidth not known: no matched call of at least 1 MiB"
      : `${formatBandwidth(flow.gbps)}, ${flow.of}${flow.isOwn ? "" : ": of the whole group, not of this pair alone"}`;
  return [`${formatBytes(flow.bytes)} in all steps`, place, speed];
}

const slowColumn: ColumnOf<Link> = {
  heading: "finding",
  text: ({ is_slow }) => (is_slow ? "slow" : ""),
  isWords: true,
};

function linksTable(links: readonly Link[]): HTMLElement {
  const between = links.filter(({ source, target }) => source !== target);
  if (!between.length) {
    return element("p", "No link between two nodes was seen alone: neither messages nor groups on two nodes.", "empty");
  }
  const share = (link: Link) => (link.usual_gbps ? link.gbps / link.usual_gbps : 1);
  const arrow = (link: Link) => `${link.source} ${link.operation === "send" ? "→" : "–"} ${link.target}`;
  return dataTable(
    [
      { heading: "link", text: arrow, isWords: true },
      { heading: "traffic", text: ({ operation }) => (operation === "send" ? "messages" : operation), isWords: true },
      { heading: "group size", text: ({ group_size: size }) => String(size), order: ({ group_size: size }) => size },
      {
        heading: "bytes of a call from",
        text: (link) => formatBytes(link.bytes_from),
        order: (link) => link.bytes_from,
      },
      { heading: "calls", text: ({ count }) => String(count), order: ({ count }) => count },
      { heading: "bandwidth", text: ({ gbps }) => formatBandwidth(gbps), order: ({ gbps }) => gbps },
      {
        heading: "of similar links",
        text: (link) => (link.usual_gbps ? `${(100 * share(link)).toFixed(0)} %` : "–"),
        order: share,
      },
      ...(between.some(({ is_slow }) => is_slow) ? [slowColumn] : []),
    ],
    [...between].sort((a, b) => share(a) - share(b)),
  );
}
