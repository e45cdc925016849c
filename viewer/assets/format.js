// Numbers for people. Times are integer nanoseconds until they reach this file.
"use strict";

function significant(value) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: 3, useGrouping: false });
}

function formatDuration(ns) {
  if (ns === null || ns === undefined) return "–";
  const size = Math.abs(ns);
  if (size >= 1e9) return `${significant(ns / 1e9)} s`;
  if (size >= 1e6) return `${significant(ns / 1e6)} ms`;
  if (size >= 1e3) return `${significant(ns / 1e3)} µs`;
  return `${Math.round(ns)} ns`;
}

function formatBytes(bytes) {
  if (bytes === null || bytes === undefined || bytes < 0) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < units.length - 1; unit++) bytes /= 1000;
  return `${significant(bytes)} ${units[unit]}`;
}

function formatMilliseconds(ns) {
  return (ns / 1e6).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

function formatPercent(fraction) {
  return fraction === null || fraction === undefined ? "–" : `${(100 * fraction).toFixed(1)} %`;
}

// A member list without its length: "0–3, 8".
function formatRanks(ranks) {
  const parts = [];
  for (let first = 0; first < ranks.length; ) {
    let last = first;
    while (last + 1 < ranks.length && ranks[last + 1] === ranks[last] + 1) last++;
    parts.push(last > first + 1 ? `${ranks[first]}–${ranks[last]}` : ranks.slice(first, last + 1).join(", "));
    first = last + 1;
  }
  return parts.join(", ");
}

// textContent everywhere: names come from users and are never read as HTML.
function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}
