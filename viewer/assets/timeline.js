// The timeline: one row per rank, drawn on a canvas from the columns of commtrace/analysis/timeline.py.
"use strict";

const GUTTER = 216;
const RULER = 24;
const MAIN = 30;
const LANE = 14;
const GAP = 6;
const MOST_OF_THE_WINDOW = 0.72;

class Timeline {
  constructor(canvas, tooltip, data, colours, stragglers) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.tooltip = tooltip;
    this.data = data;
    this.colours = colours;
    this.stragglers = stragglers;
    this.expanded = new Set();
    this.scroll = 0;
    this.boxes = [];
    this.hovered = null;
    this.pointer = null;
    this.scheduled = false;
    this.listen();
  }

  show(step) {
    this.step = step;
    this.layOut();
    this.fit();
  }

  // ---- geometry

  layOut() {
    let y = 0;
    this.rows = this.step.ranks.map((columns) => {
      const rank = this.data.ranks[columns.rank_index];
      const row = { rank, columns, y, lanes: [] };
      y += MAIN;
      if (this.expanded.has(rank.rank)) {
        const depths = this.laneDepths(columns.communication, rank.lanes.length);
        rank.lanes.forEach((lane, index) => {
          row.lanes.push({ lane, y, height: LANE * depths[index], index });
          y += LANE * depths[index];
        });
      }
      y += GAP;
      row.height = y - row.y;
      return row;
    });
    this.contentHeight = y;
    this.resize();
  }

  laneDepths(communication, lanes) {
    const depths = new Array(lanes).fill(1);
    communication.lane.forEach((lane, row) => {
      depths[lane] = Math.max(depths[lane], communication.sublane[row] + 1);
    });
    return depths;
  }

  resize() {
    const most = Math.max(240, Math.round(window.innerHeight * MOST_OF_THE_WINDOW));
    this.width = this.canvas.parentElement.clientWidth;
    this.height = Math.min(RULER + this.contentHeight, most);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.scrollTo(this.scroll);
    this.redraw();
  }

  x(time) {
    return GUTTER + ((time - this.from) / (this.to - this.from)) * (this.width - GUTTER);
  }

  time(x) {
    return this.from + ((x - GUTTER) / (this.width - GUTTER)) * (this.to - this.from);
  }

  fit() {
    const margin = Math.max(1, this.step.duration_ns * 0.005);
    this.look(-margin, this.step.duration_ns + margin);
  }

  look(from, to) {
    const margin = this.step.duration_ns * 0.5;
    const least = Math.max(100, this.residual());
    const span = Math.min(Math.max(to - from, least), this.step.duration_ns + 2 * margin);
    const middle = (from + to) / 2;
    const start = Math.min(Math.max(middle - span / 2, -margin), this.step.duration_ns + margin - span);
    this.from = start;
    this.to = start + span;
    this.redraw();
  }

  zoom(factor, at = (GUTTER + this.width) / 2) {
    const centre = this.time(at);
    this.look(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  pan(pixels) {
    const shift = (pixels / (this.width - GUTTER)) * (this.to - this.from);
    this.look(this.from + shift, this.to + shift);
  }

  scrollTo(y) {
    const before = this.scroll;
    this.scroll = Math.max(0, Math.min(y, RULER + this.contentHeight - this.height));
    this.redraw();
    return this.scroll !== before;
  }

  toggle(rank) {
    if (!this.expanded.delete(rank)) this.expanded.add(rank);
    this.layOut();
  }

  toggleAll() {
    const ranks = this.data.ranks.map((rank) => rank.rank);
    this.expanded = new Set(this.expanded.size ? [] : ranks);
    this.layOut();
    return this.expanded.size > 0;
  }

  residual() {
    return this.data.residual_ns ? this.data.residual_ns.p99 : 0;
  }

  // ---- drawing

  redraw() {
    if (this.scheduled || !this.step || this.to === undefined) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    const { context: c } = this;
    this.boxes = [];
    c.fillStyle = this.colours.of("surface");
    c.fillRect(0, 0, this.width, this.height);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    for (const row of this.rows) {
      const y = RULER + row.y - this.scroll;
      if (y + row.height > RULER && y < this.height) this.drawRow(row, y);
    }
    this.drawJoined();
    this.drawRuler();
  }

  drawRow(row, y) {
    const { context: c } = this;
    this.clipped(GUTTER, RULER, this.width - GUTTER, this.height - RULER, () => {
      c.fillStyle = this.colours.of("row");
      const start = this.x(row.columns.start);
      c.fillRect(start, y, this.x(row.columns.end) - start, MAIN);
      this.drawWork(row, y);
      this.drawStalls(row, y);
      this.drawHost(row, y);
      for (const lane of row.lanes) this.drawLane(row, lane, RULER + lane.y - this.scroll);
    });
    this.clipped(0, RULER, GUTTER, this.height - RULER, () => this.drawLabels(row, y));
  }

  drawLabels(row, y) {
    const { context: c } = this;
    c.fillStyle = this.colours.of("muted");
    c.fillText(this.expanded.has(row.rank.rank) ? "▾" : "▸", 2, y + MAIN / 2);
    const straggles = this.stragglers.has(row.rank.rank);
    c.fillStyle = this.colours.of(straggles ? "straggler" : "text");
    c.fillText(clip(c, straggles ? `▲ ${row.rank.label}` : row.rank.label, GUTTER - 24), 16, y + MAIN / 2);
    c.fillStyle = this.colours.of("muted");
    for (const { lane, y: laneY } of row.lanes) {
      c.fillText(clip(c, lane.label, GUTTER - 40), 30, RULER + laneY - this.scroll + LANE / 2);
    }
  }

  drawWork(row, y) {
    const { work } = row.columns;
    this.eachVisible(work, (index, x, width) => {
      const kind = this.data.kinds[work.kind[index]];
      const inset = Math.min(work.depth[index], 4) * 4;
      const colour = this.colours.has(kind) ? kind : "span";
      const box = { x, y: y + inset, width, height: MAIN - inset, row, table: "work", index };
      this.fill(box, this.colours.of(colour), this.boxLabel(work, index, kind, width), this.colours.of(`on-${colour}`));
    });
  }

  boxLabel(work, index, kind, width) {
    if (width < 12) return "";
    if (work.microbatch[index] < 0) return this.data.names[work.name[index]] || kind;
    const chunk = work.chunk[index] > 0 ? `·${work.chunk[index]}` : "";
    const number = `${work.microbatch[index]}${chunk}`;
    return width > 90 ? `${kind} ${number}` : number;
  }

  drawStalls(row, y) {
    const { stalls } = row.columns;
    this.eachVisible(stalls, (index, x, width) => {
      const state = this.data.states[stalls.state[index]];
      const inset = stalls.depth[index] > 0 ? MAIN * 0.55 : 0;
      const box = { x, y: y + inset, width, height: MAIN - inset, row, table: "stalls", index };
      this.fill(box, this.stallFill(state, this.data.roles[stalls.role[index]]));
    });
  }

  stallFill(state, role) {
    if (state === "bubble") return this.colours.hatched("bubble", "bubble-soft");
    if (state === "wait") return this.colours.hatched(this.colours.role(role), "surface");
    return this.colours.of(this.colours.role(role));
  }

  drawHost(row, y) {
    const { host } = row.columns;
    this.eachVisible(host, (index, x, width) => {
      const kind = this.data.kinds[host.kind[index]];
      const box = { x, y: y + MAIN - 6, width, height: 6, row, table: "host", index };
      this.fill(box, this.colours.of(this.colours.has(kind) ? kind : "span"));
    });
  }

  drawLane(row, { lane, index: laneIndex }, y) {
    const { communication } = row.columns;
    const colour = this.colours.of(this.colours.role(lane.role));
    this.eachVisible(communication, (index, x, width) => {
      if (communication.lane[index] !== laneIndex) return;
      const top = y + communication.sublane[index] * LANE + 1;
      const box = { x, y: top, width, height: LANE - 2, row, table: "communication", index };
      const waited = Math.min(Math.max(communication.wait[index], 0) / (this.to - this.from) * (this.width - GUTTER), width);
      this.fill(box, colour);
      if (waited >= 1) {
        this.context.fillStyle = this.colours.hatched(this.colours.role(lane.role), "surface");
        this.context.fillRect(x, top, waited, LANE - 2);
      }
    });
  }

  // Calls draw(index, x, width) for the rows that can be seen. Boxes narrower than a pixel are drawn once per pixel.
  eachVisible(columns, draw) {
    const { start, duration } = columns;
    const lastPixel = new Map();
    for (let index = 0; index < start.length; index++) {
      if (start[index] > this.to) break;
      if (start[index] + duration[index] < this.from) continue;
      const left = Math.max(this.x(start[index]), GUTTER - 2);
      const right = Math.min(this.x(start[index] + duration[index]), this.width + 2);
      const width = right - left;
      if (width < 1) {
        const key = this.layerOf(columns, index);
        if (lastPixel.get(key) === Math.floor(left)) continue;
        lastPixel.set(key, Math.floor(left));
      }
      draw(index, left, Math.max(width, 1));
    }
  }

  // Equal for boxes that are drawn in the same place and colour: of one lane and sublane, and of one kind or state.
  layerOf({ lane, sublane, kind, state }, index) {
    const place = lane ? lane[index] * 256 + sublane[index] : 0;
    const colour = kind || state;
    return place * 256 + (colour ? colour[index] : 0);
  }

  fill(box, style, label = "", ink = "") {
    const { context: c } = this;
    this.boxes.push(box);
    c.fillStyle = style;
    c.fillRect(box.x, box.y, box.width, box.height);
    if (box.width > 4) {
      c.strokeStyle = this.colours.of("surface");
      c.lineWidth = 1;
      c.strokeRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1);
    }
    if (label && box.height > 12) {
      const text = clip(c, label, box.width - 6);
      c.fillStyle = ink;
      if (text) c.fillText(text, Math.max(box.x, GUTTER) + 4, box.y + box.height / 2 + 0.5);
    }
  }

  // Outlines the communication of the box under the pointer on every rank that took part.
  drawJoined() {
    if (!this.hovered) return;
    const { context: c } = this;
    this.clipped(GUTTER, RULER, this.width - GUTTER, this.height - RULER, () => {
      c.strokeStyle = this.colours.of("text");
      c.lineWidth = 1.5;
      const own = this.boxes.find((box) => sameBox(box, this.hovered));
      if (own) c.strokeRect(own.x, own.y, own.width, own.height);
      const ends = this.joined(this.hovered);
      for (const end of ends) c.strokeRect(end.x, end.y, Math.max(end.width, 2), end.height);
      c.setLineDash([4, 3]);
      c.beginPath();
      ends.forEach((end, position) => {
        const x = position === 0 && ends[0].operation === "send" ? end.x : end.x + end.width;
        if (position === 0) c.moveTo(x, end.y + end.height / 2);
        else c.lineTo(x, end.y + end.height / 2);
      });
      c.stroke();
      c.setLineDash([]);
    });
  }

  joined(box) {
    const own = communicationOf(box);
    if (own < 0) return [];
    const join = box.row.columns.communication.join[own];
    if (join < 0) return [];
    const ends = [];
    for (const row of this.rows) {
      const { communication } = row.columns;
      const index = communication.join.indexOf(join);
      if (index < 0) continue;
      const lane = row.lanes.find((candidate) => candidate.index === communication.lane[index]);
      const y = lane ? lane.y + communication.sublane[index] * LANE + 1 : row.y + MAIN - 5;
      const x = this.x(communication.start[index]);
      const width = this.x(communication.start[index] + communication.duration[index]) - x;
      const operation = this.data.names[communication.name[index]];
      ends.push({ x, y: RULER + y - this.scroll, width, height: lane ? LANE - 2 : 4, operation });
    }
    return ends.sort((a, b) => (b.operation === "send") - (a.operation === "send"));
  }

  drawRuler() {
    const { context: c } = this;
    c.fillStyle = this.colours.of("surface");
    c.fillRect(0, 0, this.width, RULER);
    c.strokeStyle = this.colours.of("line");
    c.fillStyle = this.colours.of("muted");
    c.lineWidth = 1;
    c.beginPath();
    const tick = niceTick((this.to - this.from) / Math.max(2, (this.width - GUTTER) / 110));
    for (let time = Math.ceil(this.from / tick) * tick; time <= this.to; time += tick) {
      const x = Math.round(this.x(time)) + 0.5;
      c.moveTo(x, RULER - 5);
      c.lineTo(x, RULER);
      if (x < this.width - 50) c.fillText(time === 0 ? "0" : formatDuration(time), x + 3, 10);
    }
    c.moveTo(0, RULER - 0.5);
    c.lineTo(this.width, RULER - 0.5);
    c.stroke();
    c.fillText(this.step.title || `${stepName(this.step.step)} · ${formatDuration(this.step.duration_ns)}`, 16, 11);
    this.drawPointer();
  }

  // The line at the pointer is as wide as the clocks' uncertainty: events inside it may have another order.
  drawPointer() {
    if (!this.pointer || this.pointer.x < GUTTER) return;
    const { context: c } = this;
    const width = (2 * this.residual()) / (this.to - this.from) * (this.width - GUTTER);
    c.globalAlpha = 0.25;
    c.fillStyle = this.colours.of("accent");
    c.fillRect(Math.max(GUTTER, this.pointer.x - Math.max(width, 1) / 2), RULER, Math.max(width, 1), this.height);
    c.globalAlpha = 1;
  }

  clipped(x, y, width, height, draw) {
    const { context: c } = this;
    c.save();
    c.beginPath();
    c.rect(x, y, width, height);
    c.clip();
    draw();
    c.restore();
  }

  // ---- pointer and keyboard

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    window.addEventListener("resize", () => this.layOut());
  }

  onWheel(event) {
    if (event.shiftKey || event.offsetX < GUTTER) {
      if (this.scrollTo(this.scroll + (event.deltaY || event.deltaX))) event.preventDefault();
      return;
    }
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX);
    else this.zoom(Math.exp(event.deltaY * 0.0015), event.offsetX);
  }

  onDown(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, y: event.offsetY, moved: 0 };
  }

  onMove(event) {
    if (this.drag) {
      const [dx, dy] = [event.offsetX - this.drag.x, event.offsetY - this.drag.y];
      this.drag = { x: event.offsetX, y: event.offsetY, moved: this.drag.moved + Math.abs(dx) + Math.abs(dy) };
      this.canvas.classList.add("dragging");
      this.pan(-dx);
      this.scrollTo(this.scroll - dy);
    } else {
      this.hover(event);
    }
  }

  onUp(event) {
    const clicked = this.drag && this.drag.moved < 4;
    this.drag = null;
    this.canvas.classList.remove("dragging");
    if (!clicked || event.offsetX >= GUTTER) return;
    const y = event.offsetY - RULER + this.scroll;
    const row = this.rows.find((candidate) => y >= candidate.y && y < candidate.y + MAIN);
    if (row) this.toggle(row.rank.rank);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowLeft: () => this.pan(-80), a: () => this.pan(-80), ArrowRight: () => this.pan(80), d: () => this.pan(80),
      ArrowUp: () => this.scrollTo(this.scroll - MAIN), ArrowDown: () => this.scrollTo(this.scroll + MAIN),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), w: () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7), s: () => this.zoom(1 / 0.7), 0: () => this.fit(),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  hover(event) {
    this.pointer = event && { x: event.offsetX, y: event.offsetY };
    this.hovered = event && event.offsetX >= GUTTER ? this.boxAt(event.offsetX, event.offsetY) : null;
    this.tooltip.hidden = !this.hovered;
    if (this.hovered) {
      this.tooltip.replaceChildren(...this.describe(this.hovered));
      const { offsetWidth: width, offsetHeight: height } = this.tooltip;
      const left = event.clientX + 14 + width > window.innerWidth ? event.clientX - width - 14 : event.clientX + 14;
      const top = event.clientY + 14 + height > window.innerHeight ? event.clientY - height - 14 : event.clientY + 14;
      this.tooltip.style.left = `${Math.max(4, left)}px`;
      this.tooltip.style.top = `${Math.max(4, top)}px`;
    }
    this.redraw();
  }

  boxAt(x, y) {
    if (y < RULER) return null;
    for (let index = this.boxes.length - 1; index >= 0; index--) {
      const box = this.boxes[index];
      if (x >= box.x - 1 && x <= box.x + box.width + 1 && y >= box.y && y < box.y + box.height) return box;
    }
    return null;
  }

  // ---- text of the tooltip

  describe(box) {
    const list = element("dl");
    for (const [term, value] of this.details(box)) list.append(element("dt", term), element("dd", value));
    return [element("strong", this.headline(box)), list];
  }

  headline({ table, index, row }) {
    const columns = row.columns[table];
    if (table === "stalls") {
      const role = this.data.roles[columns.role[index]];
      const state = this.data.states[columns.state[index]];
      return { bubble: "pipeline bubble", wait: `wait for ${role}`, transfer: `transfer on ${role}` }[state];
    }
    if (table === "communication") {
      return `${this.data.names[columns.name[index]]} · ${row.rank.lanes[columns.lane[index]].role}`;
    }
    const kind = this.data.kinds[columns.kind[index]];
    const name = this.data.names[columns.name[index]];
    return name && name !== kind ? `${kind} · ${name}` : kind;
  }

  details(box) {
    const { table, index, row } = box;
    const columns = row.columns[table];
    const facts = [["rank", row.rank.label], ["duration", formatDuration(columns.duration[index])]];
    facts.push(["from", `${formatDuration(columns.start[index])} after the step began`]);
    if (columns.microbatch && columns.microbatch[index] >= 0) facts.push(["microbatch", columns.microbatch[index]]);
    if (columns.stage && columns.stage[index] >= 0) facts.push(["stage", columns.stage[index]]);
    if (columns.chunk && columns.chunk[index] >= 0) facts.push(["chunk", columns.chunk[index]]);
    const own = communicationOf(box);
    if (own >= 0) facts.push(...this.communicationDetails(row, own, table === "stalls"));
    return facts;
  }

  communicationDetails(row, index, named) {
    const { communication } = row.columns;
    const lane = row.rank.lanes[communication.lane[index]];
    const facts = named ? [["waits for", `${this.data.names[communication.name[index]]} · ${lane.role}`]] : [];
    facts.push(["bytes", formatBytes(communication.bytes[index])]);
    if (communication.peer[index] >= 0) facts.push(["peer", `rank ${communication.peer[index]}`]);
    facts.push(["group", `${formatRanks(lane.ranks)} (seq ${communication.seq[index]})`]);
    const [wait, transfer] = [communication.wait[index], communication.transfer[index]];
    if (wait < 0) facts.push(["wait", "not known: the other ranks' part was not recorded"]);
    else {
      const uncertain = wait > 0 && wait < this.residual();
      facts.push(["wait", uncertain ? `below the clock residual of ${formatDuration(this.residual())}` : formatDuration(wait)]);
      facts.push(["transfer", formatDuration(transfer)]);
    }
    if (!communication.finished[index]) facts.push(["end", "never seen: its duration is not known"]);
    if (communication.is_async[index]) facts.push(["async", "yes"]);
    facts.push(["timing", this.data.timings[communication.timing[index]]]);
    return facts;
  }

  visibleBoxes() {
    return this.boxes.map(({ x, y, width, height, table, index, row }) => {
      const columns = row.columns[table];
      const kind = { stalls: () => this.data.states[columns.state[index]], communication: () => "communication" }[table];
      return {
        x, y, width, height, table, rank: row.rank.rank,
        kind: kind ? kind() : this.data.kinds[columns.kind[index]],
        microbatch: columns.microbatch ? columns.microbatch[index] : -1,
        headline: this.headline({ table, index, row }),
      };
    });
  }
}

function communicationOf({ table, index, row }) {
  if (table === "communication") return index;
  return table === "stalls" ? row.columns.stalls.communication[index] : -1;
}

function sameBox(a, b) {
  return a.table === b.table && a.index === b.index && a.row.rank.rank === b.row.rank.rank;
}

function niceTick(atLeast) {
  const power = 10 ** Math.floor(Math.log10(Math.max(atLeast, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= atLeast);
}

// As much of a text as fits; nothing when not even one character and an ellipsis do.
function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  for (let length = Math.min(text.length - 1, Math.floor(width / 4)); length > 0; length--) {
    const shorter = `${text.slice(0, length)}…`;
    if (context.measureText(shorter).width <= width) return shorter;
  }
  return "";
}
