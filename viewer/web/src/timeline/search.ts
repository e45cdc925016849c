// Finds ranks, hosts, groups, microbatches and names in a step.

import { headline } from "./facts";
import type { Box, Step } from "./step";

export interface Hit {
  label: string;
  rank: number; // index
  box: Box | null;
}

const MOST_HITS = 20;

/** `12` or `rank 12`, a host, a coordinate as `pp1`, a group's name, `mb 3`, or part of a span's name. */
export function search(step: Step, query: string): Hit[] {
  const text = query.trim().toLowerCase();
  if (!text) return [];
  const hits = [...ranksNamed(step, text), ...microbatches(step, text), ...spansNamed(step, text)];
  return hits.slice(0, MOST_HITS);
}

function ranksNamed(step: Step, text: string): Hit[] {
  const number = /^(?:rank\s*)?(\d+)$/.exec(text)?.[1];
  const found: Hit[] = [];
  step.outline.ranks.forEach((rank, index) => {
    if (!step.has(index)) return;
    const words = rank.label.toLowerCase().split(/[\s·]+/);
    const isNamed =
      number === undefined
        ? words.some((word) => word === text) || rank.host.toLowerCase().includes(text)
        : rank.rank === Number(number);
    if (isNamed) found.push({ label: rank.label, rank: index, box: null });
    else if (
      number === undefined &&
      rank.lanes.some((lane) => lane.group.toLowerCase() === text || lane.label.toLowerCase().includes(text))
    ) {
      found.push({
        label: `${rank.label}: ${rank.lanes.find((lane) => lane.label.toLowerCase().includes(text))?.label ?? text}`,
        rank: index,
        box: null,
      });
    }
  });
  return found;
}

function microbatches(step: Step, text: string): Hit[] {
  const number = /^(?:mb|microbatch)\s*(\d+)$/.exec(text)?.[1];
  if (number === undefined) return [];
  return rowsWhere(step, "microbatch", (value) => value === Number(number));
}

function spansNamed(step: Step, text: string): Hit[] {
  if (text.length < 2) return [];
  const names = new Set(step.outline.names.flatMap((name, code) => (name.toLowerCase().includes(text) ? [code] : [])));
  return names.size ? rowsWhere(step, "name", (value) => names.has(value)) : [];
}

/** The longest stall on a role among the ranks whose boxes are there; null without any. */
export function longestStall(step: Step, role: string): Box | null {
  let [longest, most] = [null as Box | null, 0];
  for (const rank of step.outline.ranks.keys()) {
    const stalls = step.columns("stalls", rank);
    const [roles, duration] = [stalls.of("role"), stalls.of("duration")];
    for (let row = 0; row < stalls.length; row++) {
      if (duration[row]! <= most || step.outline.roles[roles[row]!] !== role) continue;
      [longest, most] = [{ table: "stalls", rank, row }, duration[row]!];
    }
  }
  return longest;
}

/** The first such box of each rank. */
function rowsWhere(step: Step, column: string, matches: (value: number) => boolean): Hit[] {
  const found: Hit[] = [];
  for (const table of ["work", "communication"] as const) {
    for (let rank = 0; rank < step.outline.ranks.length && found.length < MOST_HITS; rank++) {
      const columns = step.columns(table, rank);
      const values = columns.of(column);
      for (let row = 0; row < columns.length; row++) {
        if (!matches(values[row]!)) continue;
        const box: Box = { table, rank, row };
        found.push({ label: `${headline(step, box)} · ${step.outline.ranks[rank]!.label}`, rank, box });
        break;
      }
    }
  }
  return found;
}
