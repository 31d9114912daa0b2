/* Drawings that are not lines over steps: bars, the pipeline's timeline, the grid of ranks, the heat map of layers. */
const PHASE_COLOURS = { data: "p-data", forward: "p-forward", backward: "p-backward", reduce: "p-reduce", optimizer: "p-optimizer" };
/* Planned parts have the colours of the measured phases that contain them. Exposed communication has its own. */
const PLANNED_COLOURS = { compute: "p-forward", bubble: "p-rest", optimizer: "p-optimizer", "waits and the rest": "p-rest" };
const PART_COLOURS = ["p-forward", "p-rest", "p-reduce", "p-backward", "valid", "bad", "p-optimizer", "p-data"];

function phaseColour(name) { return colour(PHASE_COLOURS[name] || "p-rest"); }

function stackBar(parts, whole, paints, format) {
  const bar = el("div", { class: "stack", role: "img", "aria-label": Object.entries(parts).map(([n, v]) => `${n} ${format(v)}`).join(", ") });
  for (const [name, value] of Object.entries(parts)) {
    if (!(value > 0)) continue;
    const piece = el("i", { style: { width: `${(100 * value) / whole}%`, background: paints[name] } });
    piece.addEventListener("pointermove", (event) => tip(event, [tipLine(name, `${format(value)} · ${percent(value / whole, 0)}`, paints[name])]));
    piece.addEventListener("pointerleave", () => tip(null, null));
    bar.append(piece);
  }
  return bar;
}

/* A timeline with one row per pipeline rank: computation is filled, and work after the pipeline is an outline. */
class Timeline {
  constructor(label) {
    this.canvas = el("canvas", { role: "img", "aria-label": label, tabindex: 0 });
    this.node = el("div", { class: "chart" }, this.canvas);
    new ResizeObserver(() => this.paint()).observe(this.node);
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => tip(null, null));
    this.spans = []; this.end = 1;
  }

  draw(spans, end) {
    this.spans = spans; this.end = end;
    this.ranks = 1 + Math.max(0, ...spans.map((span) => span[0]));
    this.row = Math.max(7, Math.min(26, 220 / this.ranks));
    this.paint();
  }

  box([rank, , , start, end]) {
    const wide = this.node.clientWidth - 34;
    return [30 + (start / this.end) * wide, rank * this.row, Math.max(0.7, ((end - start) / this.end) * wide), this.row - 2];
  }

  paint() {
    const wide = this.node.clientWidth, tall = (this.ranks || 1) * this.row + 18, ratio = window.devicePixelRatio || 1;
    if (!wide || !this.ranks) return;
    this.canvas.width = wide * ratio; this.canvas.height = tall * ratio; this.canvas.style.height = `${tall}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    pen.font = "10.5px system-ui, sans-serif"; pen.textBaseline = "middle";
    for (let rank = 0; rank < this.ranks; rank += 1) {
      pen.fillStyle = colour("sunk"); pen.fillRect(30, rank * this.row, wide - 34, this.row - 2);
      if (this.row >= 11 || rank % 4 === 0) { pen.fillStyle = colour("faint"); pen.textAlign = "right"; pen.fillText(`pp ${rank}`, 26, rank * this.row + this.row / 2 - 1); }
    }
    for (const span of this.spans) this.span(pen, span);
    pen.fillStyle = colour("faint"); pen.textAlign = "center";
    for (const at of ticks(0, this.end, Math.max(2, wide / 120))) pen.fillText(seconds(at), Math.min(30 + (at / this.end) * (wide - 34), wide - 24), tall - 8);
  }

  span(pen, span) {
    const [x, y, w, h] = this.box(span), [, track, name] = span;
    if (track === "send") return;
    if (track === "wait") { pen.fillStyle = colour("p-rest"); pen.globalAlpha = 0.5; pen.fillRect(x, y + h / 2 - 1, w, 2); pen.globalAlpha = 1; return; }
    pen.fillStyle = track === "step" ? colour("p-optimizer") : colour(name[0] === "F" ? "p-forward" : name[0] === "W" ? "valid" : "p-backward");
    pen.globalAlpha = track === "step" ? 0.55 : 1;
    pen.fillRect(x, y, Math.max(0.7, w - 0.6), h);
    pen.globalAlpha = 1;
    if (w > 17 && h > 11 && track === "compute") { pen.fillStyle = colour("card"); pen.textAlign = "center"; pen.fillText(name.slice(1), x + w / 2, y + h / 2); }
  }

  moved(event) {
    const hit = this.spans.filter((span) => {
      const [x, y, w, h] = this.box(span);
      return span[1] !== "send" && event.offsetX >= x - 1 && event.offsetX <= x + w + 1 && event.offsetY >= y && event.offsetY <= y + h;
    }).slice(0, 4);
    const names = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
    tip(event, hit.length ? hit.map(([rank, track, name, start, end]) => tipLine(
      track === "compute" ? `${names[name[0]] || name[0]} of micro-batch ${name.slice(1)}, pp ${rank}` : `${name}, pp ${rank}`, seconds(end - start))) : null);
  }
}

/* Return the colour for a share of the range, from 0 to 1, interpolated between fixed stops. */
function heat(share) {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const stops = dark ? [[28, 38, 56], [58, 96, 190], [128, 110, 230], [240, 140, 90], [255, 224, 130]] : [[233, 238, 247], [120, 158, 240], [112, 84, 216], [217, 84, 60], [120, 20, 40]];
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at)), part = at - low;
  const mix = stops[low].map((v, i) => Math.round(v + part * (stops[low + 1][i] - v)));
  return `rgb(${mix.join(",")})`;
}

/* Return the colour of text on a colour `rgb(r,g,b)`. */
function inkOn(paint) {
  const [r, g, b] = paint.match(/\d+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151c" : "#ffffff";
}

class HeatMap {
  /* rows: names from top to bottom; columns: steps; values[column][row], coloured by their logarithm. */
  constructor(label) {
    this.canvas = el("canvas", { role: "img", "aria-label": label, tabindex: 0 });
    this.node = el("div", { class: "chart" }, this.canvas);
    new ResizeObserver(() => this.paint()).observe(this.node);
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => tip(null, null));
  }

  draw(names, steps, values) {
    Object.assign(this, { names, steps, values });
    const logs = values.flat().filter((v) => finite(v) && v > 0).map(Math.log10).sort((a, b) => a - b);
    this.low = logs[Math.floor(logs.length * 0.02)] || 0;
    this.high = logs[Math.ceil(logs.length * 0.98) - 1] || 1;
    if (this.high - this.low < 0.3) { const mid = (this.high + this.low) / 2; this.low = mid - 0.15; this.high = mid + 0.15; }
    this.row = Math.max(4, Math.min(22, 260 / names.length));
    this.paint();
  }

  paint() {
    const wide = this.node.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!wide || !this.names) return;
    const tall = this.names.length * this.row + 20, left = this.left = Math.min(92, wide * 0.24);
    this.canvas.width = wide * ratio; this.canvas.height = tall * ratio; this.canvas.style.height = `${tall}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    this.cell = (wide - left) / this.steps.length;
    const every = Math.ceil(13 / this.row);
    this.names.forEach((name, row) => {
      this.steps.forEach((_, column) => {
        const value = this.values[column][row];
        pen.fillStyle = value > 0 ? heat((Math.log10(value) - this.low) / (this.high - this.low)) : colour("sunk");
        pen.fillRect(left + column * this.cell, row * this.row, Math.ceil(this.cell - (this.cell > 6 ? 1 : 0)), this.row - (this.row > 6 ? 1 : 0));
      });
      if (row % every === 0) {
        pen.fillStyle = colour("soft"); pen.textAlign = "right";
        const shown = name.replace(/^(layers|blocks)\./, "layer ").replace(/^(encoder|decoder)\.(layers|blocks)\./, "$1 ");
        pen.fillText(shown.length > 15 ? `${shown.slice(0, 14)}…` : shown, left - 6, row * this.row + this.row / 2);
      }
    });
    pen.fillStyle = colour("faint");
    pen.textAlign = "left"; pen.fillText(`step ${whole(this.steps[0])}`, left, tall - 9);
    pen.textAlign = "right"; pen.fillText(whole(this.steps[this.steps.length - 1]), wide - 2, tall - 9);
  }

  moved(event) {
    const column = Math.floor((event.offsetX - this.left) / this.cell), row = Math.floor(event.offsetY / this.row);
    const value = (this.values[column] || [])[row];
    tip(event, finite(value) ? [tipLine(`${this.names[row]}, step ${whole(this.steps[column])}`, value.toPrecision(3))] : null);
  }
}

function scale(low, high, format) {
  const bar = el("span", { style: { background: `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(heat).join(",")})`, width: "7rem", height: ".6rem", borderRadius: "4px", display: "inline-block" } });
  return el("div", { class: "legend" }, el("span", {}, format(low), bar, format(high)));
}
