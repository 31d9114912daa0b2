/* The panels of a run. Each is made once and updated with the view: all runs, their plans, and the selected run. */
const X_NAMES = { step: "step", tokens: "tokens", time: "time" };
const X_FORMATS = { step: whole, tokens: count, time: clock };

function xOf(run, kind) { return run.series.step ? (kind === "step" ? run.series.step : run.series[kind]) : []; }

/* The run's events as marks on the step axis; on another axis, at the position of their step. */
function marksOf(run, kind) {
  const at = (step) => { const i = nearest(run.series.step || [], step); return i < 0 ? null : xOf(run, kind)[i]; };
  const marks = [];
  for (const event of run.events) {
    const x = event.kind === "resume" ? at(event.step + 0.5) : at(event.step);
    if (!finite(x)) continue;
    if (event.kind === "resume") marks.push({ x: kind === "step" ? event.step + 0.5 : x, colour: colour("warn"), label: "resumed", text: `${event.text} (${when(event.time)})` });
    if (event.kind === "checkpoint") marks.push({ x, kind: "tick", colour: colour("accent"), text: `checkpoint of step ${event.step}` });
  }
  for (const step of run.series.skipped || []) marks.push({ x: at(step), kind: "cross", colour: colour("bad"), text: `step ${step} was skipped` });
  for (const step of run.series.not_finite || []) marks.push({ x: at(step), kind: "cross", colour: colour("bad"), text: `step ${step}: the loss was not finite` });
  return marks.filter((mark) => finite(mark.x));
}

panel("runs", "Runs", "wide", "All runs of this page, the newest first. Click a name to see its panels, and the box to show or hide its curves. Below are the settings in which the shown runs differ.", ({ body, sub, node }) => {
  const list = el("div", { class: "scroll", tabindex: 0 }), differ = el("div", { class: "scroll", tabindex: 0 }), head = el("p", { class: "sub", style: { margin: ".8rem 0 .2rem" } });
  body.append(list, head, differ);
  return (view) => {
    node.hidden = view.runs.length < 2;
    if (node.hidden) return;
    const order = [...view.runs.keys()].sort((a, b) => (view.runs[b].notes.started || 0) - (view.runs[a].notes.started || 0)), shown = order.filter((n) => !view.hidden.has(n));
    sub.textContent = `${view.runs.length}, of which ${shown.length} are drawn`;
    const name = (number) => el("button", { type: "button", class: `run ${number === view.focus ? "on" : ""}`, onclick: () => view.choose(number) }, el("i", { class: "dot", style: { background: runColour(number) } }), ` ${view.runs[number].name}`);
    list.replaceChildren(el("table", {}, el("tr", {}, ["run", "state", "step", "loss", "validation", "tokens/s", "layout", "started"].map((text) => el("th", {}, text))), order.map((number) => {
      const run = view.runs[number], p = run.progress, v = run.validations[run.validations.length - 1];
      const box = el("input", { type: "checkbox", checked: !view.hidden.has(number), "aria-label": `draw ${run.name}`, onchange: (event) => view.show(number, event.target.checked) });
      return el("tr", {}, el("td", {}, box, name(number)), el("td", {}, el("span", { class: `pill ${run.state.kind}` }, run.state.kind)), el("td", {}, `${whole(p.step)} of ${whole(p.steps)}`), el("td", {}, fixed(p.loss, 4)),
        el("td", {}, v ? fixed(v.loss, 4) : dash), el("td", {}, count(p.tokens_per_s)), el("td", {}, run.layout.words || dash), el("td", {}, when(run.notes.started)));
    })));
    const keys = Object.keys(view.runs[0].settings).filter((key) => new Set(shown.map((number) => view.runs[number].settings[key])).size > 1);
    head.textContent = shown.length < 2 ? "" : keys.length ? `the ${keys.length} settings in which these ${shown.length} runs differ` : `the configs of these ${shown.length} runs are equal`;
    differ.replaceChildren(keys.length && shown.length > 1 ? el("table", { class: "settings" }, el("tr", {}, el("th", {}, "setting"), shown.map((number) => el("th", {}, view.runs[number].name))),
      keys.map((key) => el("tr", {}, el("td", {}, el("code", {}, key)), shown.map((number) => el("td", {}, view.runs[number].settings[key]))))) : "");
  };
});

panel("loss", "Loss", "two", "The training loss of each step (the faint band is the least and the most of the steps between two points, the line a running mean) and the validation loss (dots). Dashed lines are resumes: steps after the last checkpoint were lost and trained again. Ticks below are checkpoints, crosses steps that were skipped or whose loss was not finite.\nDrag to zoom, double-click to see all again. With several runs their curves lie over each other.", ({ body, sub, tools }) => {
  const state = { share: 0.6, kind: "step", log: false };
  const chart = new LineChart({ height: 300, label: "training and validation loss", format: (v) => trimmed(v, 4) });
  const keys = el("div", {});
  let last = null;
  const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.share, "aria-label": "smoothing", oninput: (e) => { state.share = Number(e.target.value); update(last); } });
  tools.append(el("label", {}, "smooth", smooth), ...choice(X_NAMES, "step", (kind) => { state.kind = kind; update(last); }), toggle("log", false, (on) => { state.log = on; update(last); }));
  body.append(chart.node, keys);
  function update(view) {
    last = view;
    const series = [], entries = [], many = view.runs.length > 1;
    Object.assign(chart.options, { log: state.log, xName: X_NAMES[state.kind], xFormat: X_FORMATS[state.kind] });
    view.runs.forEach((run, number) => {
      if (view.hidden.has(number) || !run.series.loss) return;
      const x = xOf(run, state.kind), paint = many ? runColour(number) : colour("accent"), { mean, lo, hi } = run.series.loss;
      const name = many ? run.name : "training";
      if (state.share) series.push({ name: "each", colour: paint, x, y: mean, lo, hi, thin: true, faint: true, quiet: true });
      series.push({ name, colour: paint, x, y: smoothed(mean, state.share) });
      const places = run.validations.map((v) => xOf(run, state.kind)[nearest(run.series.step, v.step)]);
      if (places.length) series.push({ name: many ? `${run.name}, validation` : "validation", colour: many ? paint : colour("valid"), x: state.kind === "step" ? run.validations.map((v) => v.step) : places, y: run.validations.map((v) => v.loss), dots: true, dashed: many });
      entries.push([name, paint]);
      if (places.length && !many) entries.push(["validation", colour("valid")]);
    });
    chart.draw(series, marksOf(view.run, state.kind));
    keys.replaceChildren(legend(entries));
    const best = view.run.validations.reduce((a, b) => (finite(b.loss) && (!a || b.loss < a.loss) ? b : a), null);
    sub.textContent = best ? `best validation ${fixed(best.loss, 4)} at step ${whole(best.step)}` : "";
  }
  return update;
});

panel("events", "Events", "third", "What happened to the run: starts, resumes, checkpoints with the time that they took, restarts and why, skipped steps, hangs, the end. The newest first.", ({ body, sub }) => (view) => {
  const run = view.run, found = [...run.events];
  for (const step of (run.series.skipped || []).slice(-20)) {
    const i = nearest(run.series.step, step);
    found.push({ kind: "skip", step, text: "the gradient was not finite: the update was skipped", time: run.series.began + (run.series.time[i] || 0) });
  }
  if (run.state.kind === "hung") found.push({ kind: "hang", text: run.state.text, time: run.progress.last_time });
  found.sort((a, b) => b.time - a.time);
  sub.textContent = found.length ? `${found.length}` : "";
  body.replaceChildren(found.length ? el("ul", { class: "events", tabindex: 0 }, found.map((event) => el("li", {},
    el("time", { title: when(event.time) }, view.live ? ago(event.time, run.now) : when(event.time).slice(5)),
    el("span", { class: `tag ${/^[a-z]+$/.test(event.kind) ? event.kind : ""}` }, event.kind),
    el("span", { class: "what" }, finite(event.step) && event.step !== null ? `step ${whole(event.step)}: ` : "", event.text))))
    : el("p", { class: "empty" }, "nothing was noted yet"));
});

panel("time", "Step time", "", "Where the seconds of a step go, as the ranks measured them (the mean over all), beside what the planner predicts for this config on this cluster. Phases are the program's own: forward and backward hold the time for which communication inside them is waited for. A small triangle marks a step that is longer than the chart is high.", ({ body, sub }) => {
  const chart = new LineChart({ height: 190, label: "seconds by phase", stacked: true, zero: true, cut: 0.03, format: seconds });
  const bars = el("div", { class: "rows", style: { margin: ".2rem 0 .7rem" } }), keys = el("div", {});
  body.append(bars, chart.node, keys);
  return (view) => {
    const { details, progress } = view.run, plan = view.plan && view.plan.step;
    const spent = { ...details.recent_phases }, paints = {};
    const rest = (progress.step_time_s || 0) - Object.values(spent).reduce((a, b) => a + b, 0);
    if (rest > 0) spent.rest = rest;
    for (const name of Object.keys(spent)) paints[name] = phaseColour(name);
    const total = Math.max(progress.step_time_s || 0, plan ? plan.step_s : 0) || 1;
    const rows = [el("span", { class: "k" }, "measured"), stackBar(spent, total, paints, seconds), el("b", {}, seconds(progress.step_time_s))];
    if (plan) {
      const parts = Object.fromEntries(Object.keys(plan.parts).map((name) => [name, colour(PLANNED_COLOURS[name] || "valid")]));
      rows.push(el("span", { class: "k" }, "planned"), stackBar(plan.parts, total, parts, seconds), el("b", {}, seconds(plan.step_s)));
      const off = progress.step_time_s / plan.step_s - 1;
      sub.textContent = !finite(off) ? "" : view.plan.hint ? `planned for ${plan.cluster}, which stands for any CPU` : `${off >= 0 ? "+" : ""}${percent(off, 0)} against the plan for ${plan.cluster}`;
      const exposed = Object.keys(plan.parts).some((name) => name.endsWith("exposed"));
      /* One entry for each colour: planned parts have the colours of the measured phases that contain them. */
      const names = {}, add = (name, paint) => { names[paint] = [...(names[paint] || []), name]; };
      for (const [name, paint] of Object.entries(paints)) add(name, paint);
      add("planned compute", parts.compute); add("planned bubble and waits", colour("p-rest"));
      if (exposed) add("planned communication", colour("valid"));
      keys.replaceChildren(legend(Object.entries(names).map(([paint, found]) => [found.join(", "), paint])));
    } else {
      rows.push(el("span", { class: "k" }, "planned"), el("span", { class: "soft" }, view.plan ? view.plan.hint || view.plan.why_not || "nothing is known of this run's ranks yet" : "the planner is still counting"), el("span", {}));
      sub.textContent = `mean of the last ${progress.recent_steps} steps`;
      keys.replaceChildren(legend(Object.entries(paints)));
    }
    if (plan && view.plan.hint) rows.push(el("span", {}), el("span", { class: "soft" }, view.plan.hint), el("span", {}));
    bars.replaceChildren(...rows);
    chart.draw(Object.entries(details.phases).map(([name, y]) => ({ name, colour: phaseColour(name), x: details.step, y })));
  };
});

panel("speed", "Throughput", "", "Tokens per second of all ranks together and, where the device's peak is known, MFU:\nMFU = model FLOPs per second / (ranks x the device's dense peak in this precision).\nModel FLOPs are those of forward and backward with full attention; what is computed again counts for nothing.", ({ body, sub, tools }) => {
  const state = { kind: "tokens" };
  const chart = new LineChart({ height: 250, label: "throughput", zero: true, format: count });
  let last = null;
  tools.append(...choice({ tokens: "tokens/s", tflops: "TFLOP/s", mfu: "MFU" }, "tokens", (kind) => { state.kind = kind; update(last); }));
  body.append(chart.node);
  function update(view) {
    last = view;
    const formats = { tokens: count, tflops: (v) => flops(v).join(" "), mfu: (v) => percent(v, 1) };
    Object.assign(chart.options, { format: formats[state.kind] });
    const series = view.runs.map((run, number) => {
      const s = run.series, factor = state.kind === "tokens" ? 1 : state.kind === "tflops" ? s.tokens_to_tflops : s.tokens_to_tflops * s.tflops_to_mfu;
      if (!s.tokens_per_s || view.hidden.has(number) || !factor) return null;
      const { mean, lo, hi } = s.tokens_per_s, by = (values) => values && values.map((v) => (finite(v) ? v * factor : null));
      return { name: run.name, colour: view.runs.length > 1 ? runColour(number) : colour("accent"), x: s.step, y: by(mean), lo: by(lo), hi: by(hi) };
    }).filter(Boolean);
    chart.draw(series, marksOf(view.run, "step").filter((mark) => !mark.kind));
    const p = view.run.progress;
    sub.textContent = state.kind === "mfu" && !p.mfu ? "the device's peak is unknown: set run.peak_tflops"
      : finite(p.flops_per_sample) ? `${flops(p.flops_per_sample / 1e12).join(" ").replace("/s", "s")} per sequence` : "";
  }
  return update;
});

panel("bytes", "Bytes by axis", "two", "What one step sends over each axis of the layout, summed over all ranks: as planned from the config, and as the ranks' ledgers counted it. The two must be the same to the byte; a difference is red, with the step in which it was first seen. Exposed is the time for which a rank waited, in the mean.", ({ body, sub }) => (view) => {
  const comm = view.plan && view.plan.comm, details = view.run.details;
  if (!comm || !Object.keys(comm).length) {
    sub.textContent = "";
    body.replaceChildren(el("p", { class: "empty" }, comm ? "a single rank communicates with nobody" : "the planner is still counting"));
    return;
  }
  const cells = ["axis", "calls", "planned", "recorded", "", "exposed a step"];
  const rows = Object.entries(comm).filter(([, c]) => c.recorded).map(([axis, c]) => {
    const wrong = c.differs_at !== null, exposed = details.exposed[axis], off = (c.recorded.wire_bytes || 0) - (c.planned.wire_bytes || 0);
    const how = off ? ` by ${off > 0 ? "+" : "−"}${bytes(Math.abs(off))}` : "";
    return el("tr", {}, el("td", {}, el("b", {}, axis)), el("td", {}, count(c.recorded.calls)), el("td", {}, bytes(c.planned.wire_bytes)),
      el("td", { class: wrong ? "bad" : "" }, bytes(c.recorded.wire_bytes)),
      el("td", { class: wrong ? "bad" : c.varies ? "soft" : "ok" }, wrong ? `✗ differs${how}, first seen at step ${whole(c.differs_at)}` : c.varies ? "depends on the tokens" : "✓ equal"),
      el("td", {}, exposed ? seconds(median(exposed.slice(-20))) : dash));
  });
  const wrong = Object.values(comm).filter((c) => c.differs_at).length;
  sub.textContent = wrong ? `${wrong} of ${rows.length} axes differ from the plan` : "planned and recorded are equal";
  body.replaceChildren(el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("tr", {}, cells.map((name) => el("th", {}, name))), rows)));
});

panel("memory", "Memory", "third", "The most that one rank holds: as planned by kind, and as measured. On an accelerator that is the peak of its tensors; on a CPU it is the whole process, with Python and torch themselves (about half a GiB).", ({ body, sub }) => (view) => {
  const plan = view.plan && view.plan.memory, peak = view.run.details.peak_bytes, room = view.plan && view.plan.room_bytes;
  const measured = peak ? peak.max[peak.max.length - 1] : null;
  const kinds = plan ? Object.fromEntries(Object.entries(plan).filter(([k, v]) => k !== "peak" && v > 0)) : {};
  if (plan) kinds["for a moment"] = Math.max(0, plan.peak - Object.values(kinds).reduce((a, b) => a + b, 0));
  const paints = Object.fromEntries(Object.keys(kinds).map((name, i) => [name, colour(PART_COLOURS[(i + 6) % PART_COLOURS.length])]));
  const top = Math.max(plan ? plan.peak : 0, measured || 0, room || 0) || 1;
  const rows = [];
  if (plan) rows.push(el("span", { class: "k" }, "planned"), stackBar(kinds, top, paints, bytes), el("b", {}, bytes(plan.peak)));
  if (peak) {
    for (const part of ["max", "median", "min"]) {
      const value = peak[part][peak[part].length - 1];
      rows.push(el("span", { class: "k" }, `measured, ${part}`), stackBar({ [part]: value }, top, { [part]: colour("accent") }, bytes), el("b", {}, bytes(value)));
    }
  }
  if (room) rows.push(el("span", { class: "k" }, "the device"), stackBar({ device: room }, top, { device: colour("p-rest") }, bytes), el("b", {}, bytes(room)));
  sub.textContent = view.run.layout.device === "cpu" && peak ? "planned: tensors; measured: whole processes, with Python and torch" : "of one rank";
  body.replaceChildren(rows.length ? el("div", { class: "rows" }, rows) : el("p", { class: "empty" }, "no memory was measured"), plan ? legend(Object.entries(paints)) : "");
});

panel("pipeline", "Pipeline", "wide", "One step as it was measured (run.trace: true traces the third step of a process), and below the same schedule simulated, on the same scale. Blue is forward, violet backward, green what follows; what is empty is the bubble. A simulation with the step's own mean times shows what the schedule alone costs.", ({ body, sub, node }) => {
  const measured = new Timeline("the measured step"), planned = new Timeline("the simulated step");
  const heads = [el("p", { class: "sub", style: { margin: ".1rem 0 .2rem" } }), el("p", { class: "sub", style: { margin: ".5rem 0 .2rem" } })];
  const none = el("p", { class: "empty" }, "no step was traced: set run.trace=true");
  body.append(none, heads[0], measured.node, heads[1], planned.node);
  return (view) => {
    const trace = view.run.trace, drawn = view.plan && view.plan.simulated;
    node.hidden = view.run.layout.pp === 1 && !trace;
    none.hidden = Boolean(trace);
    for (const node of [heads[0], measured.node]) node.hidden = !trace;
    for (const node of [heads[1], planned.node]) node.hidden = !(trace && drawn);
    sub.textContent = trace ? trace.earlier || trace.name : "";
    if (!trace) return;
    const end = (spans) => Math.max(...spans.map((span) => span[4]));
    const longest = Math.max(end(trace.spans), drawn ? end(drawn.spans) : 0);
    heads[0].textContent = `measured: ${seconds(end(trace.spans))}${finite(trace.bubble) ? `, ${percent(trace.bubble)} of the pipeline idle or waiting` : ""}`;
    measured.draw(trace.spans, longest);
    if (!drawn) return;
    heads[1].textContent = `simulated with ${drawn.how}: ${seconds(end(drawn.spans))}, bubble ${percent(drawn.bubble)}`;
    planned.draw(drawn.spans, longest);
  };
});
