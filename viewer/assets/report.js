// Puts the report together: the header, the timeline's controls, and the panels of the summary.
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
report.timeline.steps = JSON.parse(document.getElementById("boxes").textContent);
const summary = report.summary;
const byId = (id) => document.getElementById(id);
let plans = null;

// Colours of the style sheet by name, and patterns made of them; cleared when the theme changes.
class Colours {
  constructor() {
    this.forget();
  }

  forget() {
    this.style = getComputedStyle(document.documentElement);
    this.known = new Map();
  }

  has(name) {
    return this.of(name) !== "";
  }

  of(name) {
    if (!this.known.has(name)) this.known.set(name, this.style.getPropertyValue(`--${name}`).trim());
    return this.known.get(name);
  }

  role(role) {
    const family = { "dp-cp": "dp", "expert-dp": "dp", "expert-tp": "tp", "position-embedding": "embedding" };
    const name = family[role] || role;
    return ["tp", "pp", "dp", "cp", "ep", "embedding"].includes(name) ? name : "role";
  }

  hatched(ink, paper) {
    const key = `${ink}/${paper}`;
    if (!this.known.has(key)) this.known.set(key, this.hatch(this.of(ink), this.of(paper)));
    return this.known.get(key);
  }

  hatch(ink, paper) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const context = tile.getContext("2d");
    context.fillStyle = paper;
    context.fillRect(0, 0, 6, 6);
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    for (const offset of [-6, 0, 6]) {
      context.moveTo(offset - 1, 7);
      context.lineTo(offset + 7, -1);
    }
    context.stroke();
    return context.createPattern(tile, "repeat");
  }
}

const colours = new Colours();

function swatch(colour, label, hatched = false) {
  const item = element("span");
  const mark = element("i", "", hatched ? "swatch hatched" : "swatch");
  mark.style.setProperty("--colour", `var(--${colour})`);
  item.append(mark, label);
  return item;
}

function table(header, rows) {
  const [wordy, names] = [header.map((cell) => cell.startsWith("<")), header.map((cell) => cell.replace("<", ""))];
  const body = element("table");
  const line = (tag, cells) => {
    const row = element("tr");
    row.append(...cells.map((cell, column) => element(tag, String(cell), wordy[column] ? "word" : "")));
    return row;
  };
  const [head, content] = [element("thead"), element("tbody")];
  head.append(line("th", names));
  content.append(...rows.map((cells) => line("td", cells)));
  body.append(head, content);
  return body;
}

function joined(parts) {
  return parts.filter((part) => part !== "" && part !== undefined && part !== null).join(" · ");
}

// ---- header

// The wall time of the whole run, largest part first; empty for a report of some steps.
function budgetInWords(budget) {
  if (!budget || !budget.wall_ns) return "";
  const words = {
    training: "training steps", repeated: "steps that were done again", evaluation: "evaluation",
    checkpoint: "checkpoints", loading: "loading data between steps", start: "start", restart: "restarts", unknown: "not known",
  };
  const parts = Object.entries(words).map(([part, name]) => ({ name, ns: budget[`${part}_ns`] }))
    .filter(({ ns }) => ns >= 0.001 * budget.wall_ns).sort((first, second) => second.ns - first.ns)
    .map(({ name, ns }) => `${name} ${formatPercent(ns / budget.wall_ns)} (${formatDuration(ns)})`);
  const attempts = budget.attempts > 1 ? ` in ${budget.attempts} attempts` : "";
  return `Whole run: ${formatDuration(budget.wall_ns)}${attempts}, goodput ${formatPercent(budget.goodput)} `
    + `(training steps that were kept). Mean of the ranks: ${parts.join(", ")}.`;
}

// Durations of the attempts of repeated steps.
function attemptsInWords(repeated) {
  return (repeated || []).slice(0, 10).map(({ step, attempts }) => {
    const listed = attempts.map((one) => `attempt ${one.attempt} at ${new Date(one.start_ns / 1e6).toLocaleTimeString()}: ${formatDuration(one.duration_ns)}`);
    return `Step ${step} was done ${attempts.length} times: ${listed.join(", ")}. Shown is the last one of this launch.`;
  });
}

function showHeader() {
  const { run } = summary;
  byId("title").textContent = `commtrace · ${run.id}` + (run.attempt > 0 ? ` · attempt ${run.attempt + 1}` : "");
  const parallel = Object.entries(run.parallel || {}).filter(([, size]) => size > 1);
  byId("facts").textContent = joined([
    `${run.world_size} ranks`, `${run.hosts.length} ${run.hosts.length === 1 ? "host" : "hosts"}`,
    stepCount(run.steps),
    parallel.map(([name, size]) => `${name} ${size}`).join(", "), run.backend, run.device, clocks(),
  ]);
  byId("verdict").textContent = summary.verdict;
  byId("run-budget").textContent = budgetInWords(summary.run_budget);
  byId("notes").append(...attemptsInWords(summary.repeated_steps).map((line) => element("li", line)));
  byId("notes").append(...summary.problems.map((problem) => element("li", problem)));
}

function stepCount({ count, left_out: leftOut }) {
  const others = (leftOut || []).map((part) => `${part.count} left out: ${part.reason}`);
  return `${count} ${count === 1 ? "step" : "steps"}` + (others.length ? ` (${others.join("; ")})` : "");
}

function stepName(step) {
  return step < 0 ? "whole recording" : `step ${step}`;
}

function clocks() {
  const { method, residual_ns: residual } = summary.alignment;
  return residual && residual.max ? `clocks: ${method}, residual p99 ${formatDuration(residual.p99)}` : `clocks: ${method}`;
}

// ---- timeline

function showTimeline() {
  const { timeline: data } = report;
  if (!data.steps.length) {
    byId("timeline").parentElement.replaceChildren(element("p", report.steps.note, "empty"));
    return null;
  }
  const view = new Timeline(byId("timeline"), byId("tooltip"), data, colours, new Set(summary.stragglers.flatMap((found) => [found, ...found.members].map(({ rank }) => rank))));
  const plan = planView();
  const select = byId("step");
  data.steps.forEach((step, index) => {
    const option = element("option", `${step.step < 0 ? "whole recording" : step.step} · ${formatDuration(step.duration_ns)}${step.note ? ` · ${step.note}` : ""}`);
    option.value = index;
    select.append(option);
  });
  const choose = (index) => {
    if (index < 0 || index >= data.steps.length) return;
    select.value = index;
    view.show(data.steps[index]);
    if (plan) showPlan(plan, data.steps[index]);
    byId("previous").disabled = index === 0;
    byId("next").disabled = index === data.steps.length - 1;
    byId("timeline").setAttribute("aria-label", `Timeline of ${stepName(data.steps[index].step)}; the table below has the numbers`);
  };
  const shift = (by) => choose(Number(select.value) + by);
  const toggleLanes = () => byId("lanes").setAttribute("aria-pressed", String(view.toggleAll()));
  select.addEventListener("change", () => choose(Number(select.value)));
  byId("previous").addEventListener("click", () => shift(-1));
  byId("next").addEventListener("click", () => shift(1));
  byId("zoom-in").addEventListener("click", () => view.zoom(0.6));
  byId("zoom-out").addEventListener("click", () => view.zoom(1 / 0.6));
  byId("fit").addEventListener("click", () => view.fit());
  byId("lanes").addEventListener("click", toggleLanes);
  byId("timeline").addEventListener("keydown", (event) => {
    const keys = { "[": () => shift(-1), "]": () => shift(1), c: toggleLanes };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) keys[event.key]();
  });
  byId("embedded").textContent = report.steps.note;
  byId("precision").textContent = precision(data);
  byId("legend").append(...timelineLegend(data));
  choose(report.steps.first_shown);
  return view;
}

// The plan of the pipeline, below the step and on its time scale; null for a run without one.
function planView() {
  if (!report.plan) return null;
  byId("plan-panel").hidden = false;
  plans = new Timeline(byId("plan"), byId("plan-tooltip"), report.plan.outline, colours, new Set());
  return plans;
}

function showPlan(view, step) {
  const planned = report.plan.step.duration_ns;
  const duration = Math.max(planned, step.duration_ns);
  view.show({ ...report.plan.step, duration_ns: duration, title: `plan · ${formatDuration(planned)}` });
  byId("plan").setAttribute("aria-label", `Plan of the pipeline: ${formatDuration(planned)}`);
  byId("plan-note").textContent = `One rank of each stage, in the order of work that was recorded. `
    + `Forwards and backwards would be over after ${formatDuration(planned)}; ${stepName(step.step)} took ${formatDuration(step.duration_ns)}, `
    + "with optimizer and data-parallel communication.";
}

function precision(data) {
  if (!data.residual_ns) return "The clocks of the hosts could not be aligned: compare times within a host only.";
  if (!data.residual_ns.p99) return "";
  return `Times of different ranks are comparable to within ${formatDuration(data.residual_ns.p99)} (p99): the band at the pointer is that wide.`;
}

function timelineLegend(data) {
  const kinds = new Set();
  const roles = new Set();
  for (const step of data.steps) {
    for (const { work, host, stalls } of step.ranks) {
      for (const kind of [...work.kind, ...host.kind]) kinds.add(data.kinds[kind]);
      for (const [index, state] of stalls.state.entries()) {
        if (data.states[state] !== "bubble") roles.add(data.roles[stalls.role[index]]);
      }
    }
  }
  const named = ["forward", "backward", "recompute", "optimizer", "data", "checkpoint", "gc"].filter((kind) => kinds.has(kind));
  const marks = summary.stragglers.length ? [element("span", "▲ straggler")] : [];
  const numbered = (kind) => (kind === "forward" || kind === "backward" ? `${kind} (microbatch)` : kind);
  return [
    ...named.map((kind) => swatch(kind, numbered(kind))),
    swatch("bubble", "pipeline bubble", true),
    ...[...roles].sort().flatMap((role) => [
      swatch(colours.role(role), `wait for ${role}`, true), swatch(colours.role(role), `transfer on ${role}`),
    ]),
    ...marks,
  ];
}

// ---- breakdown

// The parts of a rank's step in the order in which they are stacked; together they are its wall time.
function parts(rank, roles) {
  const exposed = roles.flatMap((role) => {
    const { wait, transfer } = rank.exposed_ns[role] || { wait: 0, transfer: 0 };
    return [
      { name: `${role} wait`, ns: wait, colour: colours.role(role), hatched: true },
      { name: `${role} transfer`, ns: transfer, colour: colours.role(role) },
    ];
  });
  return [
    { name: "compute", ns: rank.compute_ns, colour: "forward" }, ...exposed,
    { name: "exposed memory", ns: rank.exposed_memory_ns, colour: "span" },
    { name: "pipeline bubble", ns: rank.bubble_ns, colour: "bubble", hatched: true },
    { name: "idle", ns: rank.idle_ns, colour: "idle" }, { name: "data", ns: rank.data_ns, colour: "data" },
    { name: "checkpoint", ns: rank.checkpoint_ns, colour: "checkpoint" }, { name: "gc", ns: rank.gc_ns, colour: "gc" },
    { name: "other", ns: rank.other_ns, colour: "other" },
  ];
}

function showBreakdown() {
  const longest = Math.max(1, ...summary.ranks.map((rank) => rank.wall_ns));
  const roles = [...new Set(summary.ranks.flatMap((rank) => Object.keys(rank.exposed_ns)))].sort();
  const rows = summary.ranks.map((rank) => ({ rank, parts: parts(rank, roles) }));
  const somewhere = new Set(rows.flatMap((row) => row.parts.filter((part) => part.ns > 0).map((part) => part.name)));
  const present = rows.length ? rows[0].parts.filter((part) => somewhere.has(part.name) || part.name === "other") : [];
  byId("breakdown-hint").textContent = `Mean per step over ${summary.run.steps.count || 1} ${summary.run.steps.count > 1 ? "steps" : "step"}. The parts of a rank add up to its wall time; what is in no span is shown as other.`;
  byId("breakdown-legend").append(...present.map((part) => swatch(part.colour, part.name, part.hatched)));
  const labels = new Map(report.timeline.ranks.map((rank) => [rank.rank, rank.label]));
  for (const { rank, parts: own } of rows) {
    const stack = element("div", "", "stack");
    for (const part of own.filter((candidate) => candidate.ns > 0)) {
      const piece = element("i", "", part.hatched ? "hatched" : "");
      piece.style.setProperty("--colour", `var(--${part.colour})`);
      piece.style.width = `${(100 * part.ns) / longest}%`;
      piece.title = `${part.name}: ${formatDuration(part.ns)}, ${formatPercent(part.ns / rank.wall_ns)} of the step`;
      stack.append(piece);
    }
    byId("breakdown").append(element("span", labels.get(rank.rank) || `rank ${rank.rank}`), stack, element("span", formatDuration(rank.wall_ns)));
  }
  const names = present.map((part) => part.name);
  byId("breakdown-table").append(table(
    ["<rank", "wall ms", ...names.map((name) => `${name} ms`), "hidden communication ms"],
    rows.map(({ rank, parts: own }) => {
      const value = new Map(own.map((part) => [part.name, part.ns]));
      const shown = names.map((name) => formatMilliseconds(value.get(name) || 0));
      return [labels.get(rank.rank) || `rank ${rank.rank}`, formatMilliseconds(rank.wall_ns), ...shown, formatMilliseconds(rank.hidden_ns)];
    }),
  ));
}

// ---- the critical path and the lost time

const MOST_SHARES = 12;

function oneBar(parts, whole) {
  const stack = element("div", "", "stack");
  for (const part of parts.filter(({ ns }) => ns > 0)) {
    const piece = element("i", "", part.hatched ? "hatched" : "");
    piece.style.setProperty("--colour", `var(--${part.colour})`);
    piece.style.width = `${(100 * part.ns) / whole}%`;
    piece.title = `${part.name}: ${formatPercent(part.ns / whole)}`;
    stack.append(piece);
  }
  return stack;
}

function showCriticalPath() {
  const path = summary.critical_path;
  if (!path || !path.ns) {
    byId("critical-path").append(element("p", "It is not known: no step was recorded in full, or the clocks of the hosts could not be aligned.", "empty"));
    return;
  }
  const who = ({ rank, kind, role }) => (["transfer", "unknown"].includes(kind) && role ? `${kind} on ${role}` : `rank ${rank}, ${kind}`);
  const colour = ({ kind, role }) => {
    if (kind === "transfer") return colours.role(role);
    const name = { input: "data", "garbage collection": "gc" }[kind] || kind;
    return colours.has(name) ? name : "other";
  };
  const sums = new Map();
  for (const share of path.shares) {
    const known = sums.get(who(share)) || { name: who(share), ns: 0, colour: colour(share), hatched: share.kind === "unknown" };
    sums.set(known.name, { ...known, ns: known.ns + share.ns });
  }
  const parts = [...sums.values()].sort((first, second) => second.ns - first.ns);
  const shown = parts.slice(0, MOST_SHARES);
  const left = parts.slice(MOST_SHARES);
  const unsure = path.uncertain_ns >= 0.01 * path.ns ? ` ${formatPercent(path.uncertain_ns / path.ns)} of it is uncertain: the clocks agree no better.` : "";
  byId("critical-path").append(
    element("p", `The job's step takes ${formatDuration(path.ns / path.steps)} in the mean, from the earliest begin (or the end of the step before, if that is later) to the latest end on any rank. `
      + `It is made of this work and these transfers; making anything else faster does not make it shorter.${unsure}`, "hint"),
    oneBar(parts, path.ns),
    table(["<what", "ms per step", "share"], [
      ...shown.map(({ name, ns }) => [name, formatMilliseconds(ns / path.steps), formatPercent(ns / path.ns)]),
      ...(left.length ? [[`${left.length} others`, formatMilliseconds(sum(left) / path.steps), formatPercent(sum(left) / path.ns)]] : []),
    ]),
  );
}

function sum(parts) {
  return parts.reduce((total, { ns }) => total + ns, 0);
}

function showLostTime() {
  const lost = summary.lost_time;
  if (!lost || !lost.steps_ns) {
    byId("lost-time").append(element("p", "It is not known: the steps of this run could not be replayed.", "empty"));
    return;
  }
  const words = {
    ideal_ns: ["ideal", "forward"], stragglers_ns: ["stragglers", "gc"], imbalance_ns: ["imbalance", "backward"],
    exposed_communication_ns: ["exposed communication", "dp"], bubble_ns: ["bubble", "bubble"],
    input_ns: ["input", "data"], rest_ns: ["the rest", "other"],
  };
  const parts = Object.entries(words).map(([key, [name, colour]]) => ({ name, colour, ns: lost[key], hatched: key === "bubble_ns" }));
  const time = (ns) => (lost.gpus === null ? formatDuration(ns) : `${significant((ns * lost.gpus) / 3.6e12)} GPU-hours`);
  byId("lost-time").append(
    element("p", `Of ${time(lost.steps_ns)} in steps, ${formatPercent(1 - lost.ideal_ns / lost.steps_ns)} is beyond the ideal, in which like work takes as `
      + "long as on the quicker ranks and nothing waits. The parts add up to the whole.", "hint"),
    oneBar(parts, lost.steps_ns),
    table(["<what", "time", "share"], parts.filter(({ ns }) => ns).map(({ name, ns }) => [name, time(ns), formatPercent(ns / lost.steps_ns)])),
  );
}

// ---- the other panels

function showStragglers() {
  const rows = summary.stragglers.map((found) => [
    found.who, found.cause.replaceAll("_", " "), whenSlow(found),
    found.cost_ms_per_step.toFixed(2) + (found.occurrence ? ` (${found.occurrence})` : ""), evidence(found.evidence), found.next_step ?? "",
  ]);
  byId("stragglers").append(rows.length
    ? table(["<who", "<cause", "<when", "cost ms per step", "<evidence", "<what to do"], rows)
    : element("p", nothingFound(), "empty"));
  const [awaited] = summary.awaited || [];
  if (awaited && awaited.stands_out) {
    const isNamed = summary.stragglers.some((found) => [found, ...found.members].some(({ rank }) => rank === awaited.rank));
    const text = isNamed ? `rank ${awaited.rank} (${formatPercent(awaited.share)} of all waiting), named above` : awaited.in_words;
    byId("stragglers").append(element("p", `Waited for most: ${text}.`, "hint"));
  }
  for (const abstention of summary.abstentions || []) byId("stragglers").append(element("p", abstention, "hint"));
}

/** The steps of a finding, and its start as time of day in UTC. */
function whenSlow(found) {
  if (!found.stretches.length) return `since step ${found.since_step}${found.since_utc ? `, ${utc(found.since_utc)}` : ""}`;
  return found.stretches.map(({ first, last, since_utc: since, until_utc: until }) =>
    `steps ${first}–${last}${since && until ? `, ${utc(since)} to ${utc(until)}` : ""}`).join("; ");
}

function utc(iso) {
  return `${iso.slice(0, 10)} ${iso.slice(11, 19)} UTC`;
}

function nothingFound() {
  if (!summary.run.steps.count) return "Not judged: no step was recorded in full, so ranks were not compared.";
  return (summary.abstentions || []).length ? "Not judged:" : "No rank was found to slow the others down.";
}

function evidence(value) {
  if (value === null || typeof value !== "object") return value ?? "";
  return Object.entries(value).map(([name, part]) => `${name.replaceAll("_", " ")}: ${evidence(part)}`).join("; ");
}

const PIPELINE_COLUMNS = [
  ["stage", "stage"], ["ranks", "ranks"], ["forward_ns", "forward"], ["backward_ns", "backward"], ["bubble_ns", "bubble"],
  ["warm_up_ns", "warm-up"], ["steady_ns", "steady"], ["cool_down_ns", "cool-down"], ["schedule_ns", "schedule"],
  ["imbalance_ns", "imbalance"], ["variation_ns", "variation"], ["p2p_ns", "P2P"],
];

function showPipeline() {
  const { pipeline } = summary;
  if (!pipeline || !(pipeline.stages > 1)) {
    byId("pipeline").append(element("p", "No pipeline was found in the run.", "empty"));
    return;
  }
  const { idle, theoretical_bubble: theoretical } = pipeline.fraction_of_phase || {};
  const unsure = (pipeline.per_stage || []).some((stage) => !waitsAreKnown(stage));
  byId("pipeline").append(element("p", joined([
    pipeline.schedule, `${pipeline.stages} stages`, pipeline.chunks > 1 ? `${pipeline.chunks} chunks per rank` : "",
    `${pipeline.microbatches} microbatches`,
    `idle ${unsure ? "at least " : ""}${formatPercent(idle)} of its phase (first forward to last backward)`,
    typeof theoretical === "number" ? `theoretical ${pipeline.schedule} bubble ${formatPercent(theoretical)}` : "",
  ])));
  const stages = pipeline.per_stage || [];
  if (!stages.length) return;
  const columns = PIPELINE_COLUMNS.filter(([name]) => name in stages[0]);
  const cell = (stage, name) => {
    if (!waitsAreKnown(stage) && !["stage", "ranks", "forward_ns", "backward_ns"].includes(name)) return "–";
    return name.endsWith("_ns") ? formatMilliseconds(stage[name]) : formatCell(name, stage[name]);
  };
  byId("pipeline").append(table(columns.map(([, heading]) => heading), stages.map((stage) =>
    columns.map(([name]) => cell(stage, name)))));
  byId("pipeline").append(element("p", "ms per step; forward and backward: mean ms of one. The bubble by phase (warm-up, "
    + "steady, cool-down) and by cause: what equal stages would wait (schedule), stages that differ (imbalance; negative: "
    + "a slow stage waits less for the others), microbatches and ranks that differ (variation), transfers (P2P)."
    + (unsure ? " –: the other side of these stages' messages is not known, so what they waited is not either." : ""), "hint"));
}

// With a few exceptions, both sides of the stage's messages were recorded: wait and transfer can be separated.
function waitsAreKnown(stage) {
  return (stage.unmatched_ns || 0) <= 0.05 * (stage.bubble_ns + stage.transfer_ns);
}

function formatCell(name, value) {
  if (value === null || value === undefined) return "–";
  if (/fraction|ratio/.test(name) && typeof value === "number") return formatPercent(value);
  if (Array.isArray(value)) return formatRanks(value);
  return typeof value === "object" ? evidence(value) : value;
}

function showCommunication() {
  const alone = summary.communication.filter((row) => row.group_size === 1).reduce((sum, row) => sum + row.count, 0);
  const rows = summary.communication.filter((row) => row.group_size !== 1);
  if (!rows.length) {
    byId("communication").append(element("p", "No communication was recorded.", "empty"));
    return;
  }
  const during = (row) => (row.bandwidth_time === "duration" ? "*" : "");
  const bandwidth = (value, row) => {
    if (value === null || value === undefined) return "–";
    return (value < 1 ? `${formatBytes(value * 1e9)}/s` : significant(value)) + during(row);
  };
  const reaches = new Set(rows.map((row) => row.inter_node)).size > 1;
  const reach = (row) => (reaches ? [{ true: "between", false: "within" }[row.inter_node] ?? "–"] : []);
  byId("communication").append(table(
    ["<role", "<operation", ...(reaches ? ["<nodes"] : []), "group size", "count", "bytes", "p50", "p99", "max", "algbw GB/s", "busbw GB/s", "exposed", "hidden", "wait"],
    rows.map((row) => [
      row.role, row.operation, ...reach(row), row.group_size, row.count, formatBytes(row.bytes),
      formatDuration(row.duration_ns.p50), formatDuration(row.duration_ns.p99), formatDuration(row.duration_ns.max),
      bandwidth(row.algbw_gbps, row), bandwidth(row.busbw_gbps, row),
      formatDuration(row.exposed_ns), formatDuration(row.hidden_ns), formatDuration(row.wait_ns),
    ]),
  ));
  byId("communication").append(element("p", "Counts, bytes, exposed, hidden and wait are sums over all ranks and steps. "
    + "Exposed: the rank was blocked on it. Wait: before its last member arrived."
    + (reaches ? " Nodes: whether the members are all within one node, or on several; –: not known." : "")
    + (rows.some(during) ? " * not matched on all members: bytes per duration, waiting included." : "")
    + (alone ? ` Left out: ${alone} calls on groups of one rank, which send nothing.` : ""), "hint"));
}

function showCoverage() {
  const { alignment, coverage, run } = summary;
  const residual = alignment.residual_ns;
  const versions = Object.entries(run.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ");
  const hosts = alignment.hosts.map((host) => `${host.host}: offset ${formatDuration(host.offset_ns)}, drift ${host.drift_ppm.toFixed(2)} ppm`);
  const spread = residual ? `residual p50 ${formatDuration(residual.p50)}, p99 ${formatDuration(residual.p99)}, max ${formatDuration(residual.max)}` : "";
  byId("coverage").append(table(["<what", "<value"], [
    ["clock alignment", joined([alignment.method, `${alignment.observations} observations`, spread])],
    ["clocks of the hosts", hosts.join("; ") || "–"],
    ["captured", evidence(coverage.captured)], ["dropped", evidence(coverage.dropped) || "nothing"],
    ["not visible", Array.isArray(coverage.not_visible) ? coverage.not_visible.join("; ") || "–" : evidence(coverage.not_visible)],
    ["versions", versions || "–"],
  ]));
}

function setTheme(theme, view) {
  document.documentElement.dataset.theme = theme;
  colours.forget();
  if (view) view.redraw();
  if (plans) plans.redraw();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light", null);
showHeader();
const view = showTimeline();
showBreakdown();
showCriticalPath();
showLostTime();
showStragglers();
showPipeline();
showCommunication();
showCoverage();
byId("theme").addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", view);
});
prefersDark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light", view));

// For tests: what is drawn, without reading pixels.
window.commtrace = {
  visibleBoxes: () => (view ? view.visibleBoxes() : []),
  plannedBoxes: () => (plans ? plans.visibleBoxes() : []),
  window: () => (view ? { step: view.step.step, from: view.from, to: view.to } : null),
};
