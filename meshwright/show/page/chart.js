/* Lines over steps on a canvas: bands, dots, stacked areas, marks, a crosshair, and a zoom that all charts share. */
const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;
const shared = { zoom: null, at: null, charts: new Set() };

function tip(event, lines) {
  const node = document.getElementById("tip");
  node.hidden = !lines;
  if (!lines) return;
  node.replaceChildren(...lines);
  const box = node.getBoundingClientRect(), room = 14;
  let x = event.clientX + room, y = event.clientY + room;
  if (x + box.width > innerWidth - 6) x = Math.max(6, event.clientX - box.width - room);
  if (y + box.height > innerHeight - 6) y = Math.max(6, event.clientY - box.height - room);
  node.style.left = `${x}px`;
  node.style.top = `${y}px`;
}

function tipLine(name, value, paint) {
  return el("div", {}, paint && el("i", { class: "dot", style: { background: paint } }), el("span", {}, name), el("span", {}, el("b", {}, value)));
}

class LineChart {
  /* options: height, label, format (of y), xFormat, log, xLog, zero, stacked, xName; `draw(series, marks)` sets the
     data. A series has name, colour, x, y and, optionally, lo, hi (a band), dots, dashed, thin, wide (drawn below thin
     lines, so that both are seen where they coincide), quiet (not in the tip). */
  constructor(options) {
    this.options = { height: 220, format: (v) => trimmed(v, 4), xFormat: whole, xName: "step", ...options };
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": this.options.label || "chart" });
    this.node = el("div", { class: "chart" }, this.canvas);
    this.series = []; this.marks = [];
    new ResizeObserver(() => this.paint()).observe(this.node);
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => { this.drag = null; shared.at = null; tip(null, null); this.others(); });
    this.canvas.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") this.drag = [event.offsetX, event.offsetX]; this.moved(event); });
    this.canvas.addEventListener("pointerup", () => this.released());
    this.canvas.addEventListener("dblclick", () => { if (this.zooms) { shared.zoom = null; this.others(); } });
    shared.charts.add(this);
  }

  get zooms() { return this.options.xName === "step"; }

  draw(series, marks = []) {
    this.series = series.filter((one) => one.x.length);
    this.marks = marks;
    this.paint();
  }

  others() {
    for (const chart of shared.charts) {
      if (!chart.node.isConnected) shared.charts.delete(chart);
      else chart.paint();
    }
  }

  released() {
    if (this.drag && Math.abs(this.drag[1] - this.drag[0]) > 8 && this.zooms) {
      const [a, b] = this.drag.map((at) => this.value(at)).sort((one, two) => one - two);
      shared.zoom = [a, b];
    }
    this.drag = null;
    this.others();
  }

  value(pixel) {
    const share = (pixel - LEFT) / this.width, [low, high] = this.range;
    return this.options.xLog ? low * (high / low) ** share : low + share * (high - low);
  }
  px(x) {
    const [low, high] = this.range;
    return LEFT + (this.options.xLog ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low || 1)) * this.width;
  }
  py(y) {
    const [low, high] = this.span;
    const share = this.options.log ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    return TOP + (1 - share) * this.high;
  }

  moved(event) {
    if (!this.range) return;
    if (this.drag) this.drag[1] = event.offsetX;
    const x = this.value(Math.min(Math.max(event.offsetX, LEFT), LEFT + this.width));
    if (this.zooms) shared.at = x;
    this.own = x;
    const lines = [el("div", {}, el("b", {}, `${this.options.xName} ${this.options.xFormat(x)}`))];
    for (const one of this.series) {
      if (one.quiet) continue;
      const index = nearest(one.x, x);
      if (index < 0 || !finite(one.y[index])) continue;
      const spread = one.lo && finite(one.lo[index]) && one.lo[index] !== one.hi[index]
        ? `  (${this.options.format(one.lo[index])} to ${this.options.format(one.hi[index])})` : "";
      const off = one.dots ? ` at ${this.options.xFormat(one.x[index])}` : "";
      lines.push(tipLine(one.name + off, this.options.format(one.y[index]) + spread, one.colour));
    }
    for (const mark of this.marks) if (mark.text && Math.abs(this.px(mark.x) - event.offsetX) < 6) lines.push(el("div", { class: "soft" }, mark.text));
    if (this.zooms) this.others(); else this.paint();
    tip(event, lines.slice(0, 14));
  }

  ranges() {
    let low = Infinity, high = -Infinity;
    for (const one of this.series) { low = Math.min(low, one.x[0]); high = Math.max(high, one.x[one.x.length - 1]); }
    if (this.zooms && shared.zoom) { low = Math.max(low, shared.zoom[0]); high = Math.min(high, shared.zoom[1]); }
    if (!(high > low)) { const at = finite(low) ? low : 0; low = this.options.xLog ? at / 1.5 : at - 0.5; high = this.options.xLog ? at * 1.5 : at + 0.5; }
    this.range = [low, high];
    const seen = [];
    if (this.options.stacked) this.pile();
    for (const one of this.options.stacked ? this.series.slice(-1).map((s) => ({ x: s.x, y: s.top })) : this.series) {
      for (let i = 0; i < one.x.length; i += 1) {
        if (one.x[i] < low || one.x[i] > high) continue;
        for (const y of one.lo ? [one.y[i], one.lo[i], one.hi[i]] : [one.y[i]]) if (finite(y) && (!this.options.log || y > 0)) seen.push(y);
      }
    }
    seen.sort((a, b) => a - b);
    /* Cut off a few outliers, which would otherwise flatten all other values. */
    const share = this.options.cut || 0.002, cut = Math.floor(seen.length * share);
    let bottom = seen[this.options.cut ? 0 : cut], top = seen[seen.length - 1 - cut];
    if (!finite(bottom)) { bottom = this.options.log ? 0.1 : 0; top = 1; }
    if (this.options.zero) bottom = Math.min(0, bottom);
    if (this.options.log) { bottom /= 1.1; top *= 1.1; }
    else {
      const pad = (top - bottom) * 0.06 || Math.abs(top) * 0.05 || 1;
      top += pad;
      if (!this.options.zero || bottom < 0) bottom -= pad;
    }
    this.span = [bottom, top];
  }

  paint() {
    const wide = this.node.clientWidth, tall = this.options.height;
    if (!wide) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(wide * ratio); this.canvas.height = Math.round(tall * ratio);
    this.canvas.style.height = `${tall}px`;
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    this.width = wide - LEFT - RIGHT; this.high = tall - TOP - BOTTOM;
    if (!this.series.length) { this.range = null; this.say("nothing yet", wide / 2, tall / 2); return; }
    this.ranges();
    this.axes();
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, this.width + 1, TOP + this.high + 1); pen.clip();
    for (const mark of this.marks) this.mark(mark);
    for (const one of this.series) if (one.lo) this.band(one);
    if (this.options.stacked) this.stack(); else for (const one of this.series) this.line(one);
    this.clips();
    this.cross();
    pen.restore();
  }

  say(text, x, y, align = "center", paint = colour("faint")) {
    this.pen.font = "11px system-ui, sans-serif";
    this.pen.fillStyle = paint; this.pen.textAlign = align; this.pen.textBaseline = "middle";
    this.pen.fillText(text, x, y);
  }

  axes() {
    const pen = this.pen, [low, high] = this.span;
    pen.lineWidth = 1; pen.strokeStyle = colour("line");
    for (const at of this.options.log ? logTicks(low, high) : ticks(low, high, Math.max(2, this.high / 44))) {
      const y = Math.round(this.py(at)) + 0.5;
      if (y < TOP - 2 || y > TOP + this.high + 2) continue;
      pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(LEFT + this.width, y); pen.stroke();
      this.say(this.options.format(at), LEFT - 7, y, "right");
    }
    for (const at of this.xTicks()) {
      if (this.zooms && at !== Math.round(at)) continue;
      const x = this.px(at);
      this.say(this.options.xFormat(at), Math.min(Math.max(x, LEFT + 8), LEFT + this.width - 12), TOP + this.high + 13);
    }
  }

  xTicks() {
    const most = Math.max(2, this.width / 95);
    if (!this.options.xLog) return ticks(...this.range, most);
    const all = [...new Set(this.series.flatMap((one) => one.x))].sort((a, b) => a - b), every = Math.ceil(all.length / Math.max(2, this.width / 60));
    return all.filter((_, i) => i % every === 0);
  }

  /* Mark the places where a value lies beyond the edge of the drawing. */
  clips() {
    const pen = this.pen, [bottom, top] = this.span, seen = new Set();
    for (const one of this.options.stacked ? this.series.slice(-1) : this.series) {
      const highs = one.top || one.hi || one.y;
      one.x.forEach((x, i) => {
        const above = highs[i] > top, below = !above && finite(one.y[i]) && one.y[i] < bottom && (!this.options.log || one.y[i] > 0);
        if (x < this.range[0] || x > this.range[1] || !(above || below)) return;
        const at = this.px(x), place = `${above}${Math.round(at / 9)}`;
        if (seen.has(place)) return;
        seen.add(place);
        const y = above ? TOP + 1 : TOP + this.high, turn = above ? 5 : -5;
        pen.fillStyle = this.options.stacked ? colour("ink") : one.colour;
        pen.beginPath(); pen.moveTo(at, y); pen.lineTo(at - 4, y + turn); pen.lineTo(at + 4, y + turn); pen.fill();
      });
    }
    this.clipped = seen.size;
  }

  path(one, values) {
    const pen = this.pen;
    let open = false;
    pen.beginPath();
    for (let i = 0; i < one.x.length; i += 1) {
      if (!finite(values[i]) || (this.options.log && values[i] <= 0)) { open = false; continue; }
      const x = this.px(one.x[i]), y = this.py(values[i]);
      if (open) pen.lineTo(x, y); else pen.moveTo(x, y);
      open = true;
    }
  }

  line(one) {
    const pen = this.pen;
    pen.strokeStyle = pen.fillStyle = one.colour;
    pen.lineJoin = "round";
    if (!one.dots || one.x.length > 1) {
      pen.lineWidth = one.wide ? 8 : one.thin ? 1 : 1.8;
      pen.globalAlpha = one.wide ? 0.28 : one.faint ? 0.35 : 1;
      pen.setLineDash(one.dashed ? [5, 4] : []);
      this.path(one, one.y);
      pen.stroke();
      pen.setLineDash([]); pen.globalAlpha = 1;
    }
    if (one.dots || one.x.length === 1 || one.points) {
      for (let i = 0; i < one.x.length; i += 1) {
        if (!finite(one.y[i])) continue;
        pen.beginPath(); pen.arc(this.px(one.x[i]), this.py(one.y[i]), one.x.length > 120 ? 1.6 : 3, 0, 7); pen.fill();
      }
    }
  }

  band(one) {
    const pen = this.pen;
    pen.fillStyle = one.colour; pen.globalAlpha = 0.16;
    pen.beginPath();
    const at = one.x.map((_, i) => i).filter((i) => finite(one.lo[i]) && finite(one.hi[i]) && (!this.options.log || one.lo[i] > 0));
    at.forEach((i, n) => (n ? pen.lineTo(this.px(one.x[i]), this.py(one.hi[i])) : pen.moveTo(this.px(one.x[i]), this.py(one.hi[i]))));
    for (const i of at.reverse()) pen.lineTo(this.px(one.x[i]), this.py(one.lo[i]));
    pen.fill(); pen.globalAlpha = 1;
  }

  /* Stack each series on the one before it. */
  pile() {
    this.series.forEach((one, number) => {
      const below = number ? this.series[number - 1].top : one.x.map(() => 0);
      one.top = one.y.map((y, i) => below[i] + (finite(y) ? y : 0));
    });
  }

  stack() {
    const pen = this.pen;
    for (const [number, one] of this.series.entries()) {
      pen.fillStyle = one.colour; pen.globalAlpha = 0.85;
      pen.beginPath();
      one.x.forEach((x, i) => (i ? pen.lineTo(this.px(x), this.py(one.top[i])) : pen.moveTo(this.px(x), this.py(one.top[i]))));
      for (let i = one.x.length - 1; i >= 0; i -= 1) pen.lineTo(this.px(one.x[i]), this.py(number ? this.series[number - 1].top[i] : 0));
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  mark(mark) {
    const pen = this.pen, x = Math.round(this.px(mark.x)) + 0.5;
    pen.strokeStyle = pen.fillStyle = mark.colour; pen.lineWidth = 1;
    if (mark.kind === "tick") { pen.fillRect(x - 1, TOP + this.high - 6, 2, 6); return; }
    if (mark.kind === "cross") {
      const y = TOP + 6;
      pen.lineWidth = 1.6;
      pen.beginPath(); pen.moveTo(x - 3.5, y - 3.5); pen.lineTo(x + 3.5, y + 3.5); pen.moveTo(x + 3.5, y - 3.5); pen.lineTo(x - 3.5, y + 3.5); pen.stroke();
      return;
    }
    pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(x, TOP); pen.lineTo(x, TOP + this.high); pen.stroke();
    pen.setLineDash([]);
    if (mark.label) this.say(mark.label, x + 4, TOP + 7, "left", mark.colour);
  }

  cross() {
    const pen = this.pen, x = this.zooms ? shared.at : null;
    if (this.drag && Math.abs(this.drag[1] - this.drag[0]) > 3) {
      pen.fillStyle = colour("accent-soft");
      pen.fillRect(Math.min(...this.drag), TOP, Math.abs(this.drag[1] - this.drag[0]), this.high);
    }
    if (!finite(x)) return;
    pen.strokeStyle = colour("faint"); pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(this.px(x), TOP); pen.lineTo(this.px(x), TOP + this.high); pen.stroke();
    for (const one of this.series) {
      const index = nearest(one.x, x), y = this.options.stacked ? null : one.y[index];
      if (!finite(y) || one.quiet) continue;
      pen.fillStyle = one.colour; pen.beginPath(); pen.arc(this.px(one.x[index]), this.py(y), 3.2, 0, 7); pen.fill();
    }
  }
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function legend(entries) {
  return el("div", { class: "legend" }, entries.map(([name, paint]) => el("span", {}, el("i", { style: { background: paint } }), name)));
}
