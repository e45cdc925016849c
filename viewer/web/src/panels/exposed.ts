import { stackedBar, swatch } from "../bars";
import type { Summary } from "../data/types";
import { byId, element } from "../dom";
import { formatDuration, formatPercent } from "../format";
import { type ExposedRole, exposedRoles } from "../overview/exposed";
import { dataTable } from "../table";
import type { Theme } from "../theme";
import type { Leads } from "./breakdown";

export function showExposed(summary: Summary, theme: Theme, leads: Leads): void {
  const panel = byId("exposed");
  const rows = exposedRoles(summary);
  if (!rows.length) {
    panel.append(element("p", "No communication was recorded on which a rank waited.", "empty"));
    return;
  }
  const wall = summary.ranks.reduce((sum, rank) => sum + rank.wall_ns, 0) / summary.ranks.length;
  const legend = element("div", "", "legend");
  legend.append(swatch("role", "wait: the last member had not arrived", true), swatch("role", "transfer"));
  const bars = element("div", "", "breakdown");
  const longest = Math.max(1, ...rows.map(({ wait, transfer }) => wait + transfer));
  for (const { role, wait, transfer } of rows) {
    const colour = theme.role(role);
    const parts = [
      { name: `${role} wait`, ns: wait, colour, hatched: true },
      { name: `${role} transfer`, ns: transfer, colour },
    ];
    const text = ({ name, ns }: { name: string; ns: number }) =>
      `${name}: ${formatDuration(ns)}, ${formatPercent(ns / wall)} of the step`;
    const bar = stackedBar(parts, longest, text, wall);
    bar.role = "img";
    bar.ariaLabel = parts.map(text).join("; ");
    bars.append(element("span", role), bar, element("span", formatDuration(wait + transfer)));
  }
  const time = (heading: string, value: (row: ExposedRole) => number | null) => ({
    heading,
    text: (row: ExposedRole) => formatDuration(value(row)),
    order: (row: ExposedRole) => value(row) ?? -1,
  });
  panel.append(
    legend,
    bars,
    dataTable(
      [
        { heading: "role", text: ({ role }) => role, isWords: true },
        time("exposed", ({ wait, transfer }) => wait + transfer),
        {
          heading: "of the step",
          text: ({ wait, transfer }) => formatPercent((wait + transfer) / wall),
          order: ({ wait, transfer }) => wait + transfer,
        },
        time("wait", ({ wait }) => wait),
        time("transfer", ({ transfer }) => transfer),
        time("hidden", ({ hidden }) => hidden),
        time("if its transfers were gone: at most", ({ saved }) => saved),
      ],
      rows,
      ({ role }) => leads.stall(role),
    ),
    element("p", explanation(summary, rows), "hint"),
  );
}

function explanation({ lost_time: lost }: Summary, rows: readonly ExposedRole[]): string {
  const all = lost?.exposed_communication_ns;
  const whole =
    lost?.steps_ns && all !== null && all !== undefined
      ? ` A replay without any transfer, with equal work, is ${formatPercent(all / lost.steps_ns)} shorter: that much of the lost time is exposed communication.`
      : "";
  const hasWait = rows.some(({ wait }) => wait > 0);
  return (
    "Per step, mean of the ranks. Waiting for the neighbours of a pipeline is in the bubble. If its transfers were gone: what they " +
    "take on the critical path, so no step can become shorter by more." +
    " A click on a role shows its longest stall in the step of the timeline." +
    (hasWait ? " Waits are not made shorter by a faster network: the last member has to come earlier." : "") +
    whole
  );
}
