// Numbers for people. Times are integer nanoseconds until they reach this file.

type Maybe = number | null | undefined;

export function significant(value: number): string {
  return value.toLocaleString("en-US", { maximumSignificantDigits: 3, useGrouping: false });
}

const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
] as const;

export function formatDuration(ns: Maybe): string {
  if (ns === null || ns === undefined) return "–";
  const size = Math.abs(ns);
  if (size >= 1e9) return `${significant(ns / 1e9)} s`;
  if (size >= 1e6) return `${significant(ns / 1e6)} ms`;
  if (size >= 1e3) return `${significant(ns / 1e3)} µs`;
  return `${Math.round(ns)} ns`;
}

/** A time of a long run: `2:05:00` from a minute on. */
export function formatClock(ns: number): string {
  const seconds = Math.round(ns / 1e9);
  if (seconds < 60) return formatDuration(ns);
  const two = (value: number) => String(value).padStart(2, "0");
  const [minutes, rest] = [Math.floor(seconds / 60) % 60, seconds % 60];
  return seconds < 3600 ? `${minutes}:${two(rest)}` : `${Math.floor(seconds / 3600)}:${two(minutes)}:${two(rest)}`;
}

/** Durations along an axis, in one unit, with the digits that tell neighbours apart. */
export function formatDurations(ticks: readonly number[]): string[] {
  const largest = Math.max(...ticks.map(Math.abs), 1);
  const [unit, name] = UNITS.find(([size]) => largest >= size)!;
  const distance = ticks.length > 1 ? Math.abs(ticks[1]! - ticks[0]!) / unit : 1;
  const digits = distance > 0 ? Math.max(0, -Math.floor(Math.log10(distance) + 1e-9)) : 0;
  return ticks.map((tick) => `${(tick / unit).toFixed(digits)} ${name}`);
}

export function formatBytes(bytes: Maybe): string {
  if (bytes === null || bytes === undefined || bytes < 0) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let [size, unit] = [bytes, 0];
  for (; size >= 1000 && unit < units.length - 1; unit++) size /= 1000;
  return `${significant(size)} ${units[unit]}`;
}

/** Memory, in units of 1024. */
export function formatMemory(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let [size, unit] = [bytes, 0];
  for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
  return `${significant(size)} ${units[unit]}`;
}

/** A bandwidth given in GB/s, which is bytes per ns. */
export function formatBandwidth(gbps: Maybe): string {
  if (gbps === null || gbps === undefined) return "–";
  return `${gbps < 0 ? "-" : ""}${formatBytes(Math.abs(gbps) * 1e9)}/s`;
}

export function formatHours(hours: number): string {
  return hours >= 1000 ? Math.round(hours).toLocaleString("en-US") : significant(hours);
}

export function formatMilliseconds(ns: number): string {
  return withoutMinusZero((ns / 1e6).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }));
}

export function formatPercent(fraction: Maybe): string {
  return fraction === null || fraction === undefined ? "–" : `${withoutMinusZero((100 * fraction).toFixed(1))} %`;
}

/** `0.0` for `-0.0`. */
export function withoutMinusZero(number: string): string {
  return /^-0(\.0*)?$/.test(number) ? number.slice(1) : number;
}

/** Members of a group, in short: `0–3, 8`. */
export function formatRanks(ranks: readonly number[]): string {
  const parts: string[] = [];
  for (let first = 0; first < ranks.length; ) {
    let last = first;
    while (last + 1 < ranks.length && ranks[last + 1] === ranks[last]! + 1) last++;
    parts.push(last > first + 1 ? `${ranks[first]}–${ranks[last]}` : ranks.slice(first, last + 1).join(", "));
    first = last + 1;
  }
  return parts.join(", ");
}

const DIMENSIONS = ["pp", "dp", "cp", "tp", "ep"]; // of a label, outermost first

/** `rank 3 · pp1 dp0 · node0`; dimensions of size 1 are left out. */
export function rankLabel(
  { rank, host, coordinates }: { rank: number; host: string; coordinates: Record<string, number> },
  sizes: Record<string, number>,
): string {
  const shown = DIMENSIONS.filter((name) => name in coordinates && (sizes[name] ?? 2) > 1);
  return joined([`rank ${rank}`, shown.map((name) => `${name}${coordinates[name]}`).join(" "), host]);
}

export function joined(parts: readonly (string | null | undefined)[]): string {
  return parts.filter((part) => part).join(" · ");
}

export function stepName(step: number): string {
  return step < 0 ? "whole recording" : `step ${step}`;
}

export function utc(iso: string): string {
  return `${iso.slice(0, 10)} ${iso.slice(11, 19)} UTC`;
}

/** Distance of ticks of a time axis, ns: 1, 2 or 5 times a power of ten, and at least `atLeast`. */
export function niceTick(atLeast: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(atLeast, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= atLeast) ?? 10 * power;
}
