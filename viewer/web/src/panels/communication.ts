import type { Communication, Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatBytes, formatDuration, significant } from "../format";
import { type ColumnOf, dataTable } from "../table";

export function showCommunication({ communication }: Summary): void {
  const panel = byId("communication");
  const alone = communication.filter((row) => row.group_size === 1).reduce((sum, row) => sum + row.count, 0);
  const rows = communication.filter((row) => row.group_size !== 1);
  if (!rows.length) {
    panel.append(element("p", "No communication was recorded.", "empty"));
    return;
  }
  const reaches = new Set(rows.map((row) => row.inter_node)).size > 1;
  const isDuring = (row: Communication) => row.bandwidth_time === "duration";
  const bandwidth = (value: number | null, row: Communication) => {
    if (value === null) return "–";
    const rate = value < 1 ? `${formatBytes(value * 1e9)}/s` : significant(value);
    return (row.bandwidth_is_bound ? "≥" : "") + rate + (isDuring(row) ? "*" : "");
  };
  const replayed = rows.reduce((sum, row) => sum + row.replayed, 0);
  const bounds = rows.reduce((sum, row) => sum + row.upper_bounds, 0);
  const duration = (heading: "p50" | "p99" | "max"): ColumnOf<Communication> => ({
    heading,
    isMinor: heading === "p50",
    text: (row) => (row.durations_are_bounds ? "≤" : "") + formatDuration(row.duration_ns[heading]),
    order: (row) => row.duration_ns[heading],
  });
  const number = (
    heading: string,
    value: (row: Communication) => number,
    text: (value: number) => string,
  ): ColumnOf<Communication> => ({
    heading,
    text: (row) => text(value(row)),
    order: value,
  });
  const nodes: ColumnOf<Communication> = {
    heading: "nodes",
    text: (row) => (row.inter_node === null ? "–" : row.inter_node ? "between" : "within"),
    isWords: true,
    isMinor: true,
  };
  panel.append(
    dataTable(
      [
        { heading: "role", text: (row) => row.role, isWords: true },
        { heading: "operation", text: (row) => row.operation, isWords: true },
        ...(reaches ? [nodes] : []),
        { ...number("group size", (row) => row.group_size, String), isMinor: true },
        number("count", (row) => row.count, String),
        number("bytes", (row) => row.bytes, formatBytes),
        duration("p50"),
        duration("p99"),
        duration("max"),
        {
          heading: "algbw",
          isMinor: true,
          text: (row) => bandwidth(row.algbw_gbps, row),
          order: (row) => row.algbw_gbps ?? -1,
        },
        { heading: "busbw", text: (row) => bandwidth(row.busbw_gbps, row), order: (row) => row.busbw_gbps ?? -1 },
        number("exposed", (row) => row.exposed_ns, formatDuration),
        number("hidden", (row) => row.hidden_ns, formatDuration),
        number("wait", (row) => row.wait_ns, formatDuration),
      ],
      rows,
    ),
    element(
      "p",
      "Counts, bytes, exposed, hidden and wait are sums over all ranks and steps. Exposed: the rank was blocked on it. " +
        "Wait: before its last member arrived." +
        (reaches ? " Nodes: whether the members are all within one node, or on several; –: unknown." : "") +
        (rows.some(isDuring) ? " * not matched on all members: bytes per duration, waiting included." : "") +
        (bounds
          ? ` Start or end of ${bounds} calls is only a bound. Quantiles and bandwidths are of the exact calls; ≤ and ≥: of all, as the exact ones hold less than half of the bytes.`
          : "") +
        (replayed
          ? ` ${replayed} calls were replayed from CUDA graphs: they are counted, and their times are not known.`
          : "") +
        (alone ? ` Left out: ${alone} calls on groups of one rank, which send nothing.` : ""),
      "hint",
    ),
  );
}
