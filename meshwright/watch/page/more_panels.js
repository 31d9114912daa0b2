panel("ranks", "Ranks", "", "Each square is a rank, coloured by how long it computes in a step (a running mean): the slowest one keeps all others waiting. A rank's place is its number; click one for its coordinates, times, memory and the last calls of its flight record, which is written after a hang and by a traced step.", ({ body, sub, tools }) => {
  const state = { key: "busy_s", rank: null, calls: null };
  const grid = el("div", { class: "ranks" }), key = el("div", {}), detail = el("div", { "aria-live": "polite" });
  let last = null;
  tools.append(...choice({ busy_s: "computes", waited_s: "waits", data_s: "waits for data", peak_bytes: "memory" }, "busy_s", (chosen) => { state.key = chosen; update(last); }));
  body.append(grid, key, detail);
  function format(name, value) { return name === "peak_bytes" ? bytes(value) : seconds(value); }
  function update(view) {
    last = view;
    const ranks = view.run.ranks, values = ranks[state.key] || [], world = Math.min(ranks.world || values.length, 4096);
    const low = Math.min(...values.filter(finite)), high = Math.max(...values.filter(finite));
    const wide = Math.max(1, Math.min(world, world <= 8 ? 8 : world <= 64 ? 8 : world <= 256 ? 16 : 32));
    grid.className = world > 128 ? "ranks many" : "ranks";
    grid.style.gridTemplateColumns = `repeat(${wide}, minmax(0, ${world <= 64 ? 64 : 30}px))`;
    sub.textContent = values.length ? `step ${whole(ranks.step)} · ${format(state.key, low)} to ${format(state.key, high)}` : "";
    grid.replaceChildren(...Array.from({ length: world || 0 }, (_, rank) => {
      const share = values.length && high > 0 ? (values[rank] - low) / Math.max(high - low, 0.6 * median(values)) : 0;
      return el("button", { type: "button", class: state.rank === rank ? "on" : "", "aria-label": `rank ${rank}`,
        style: { background: values.length ? heat(0.08 + 0.72 * share) : colour("sunk"), color: values.length ? inkOn(heat(0.08 + 0.72 * share)) : "" },
        onclick: () => choose(rank), onpointermove: (event) => tip(event, [tipLine(`rank ${rank}${place(ranks, rank)}`, format(state.key, values[rank]))]),
        onpointerleave: () => tip(null, null) }, world <= 128 ? String(rank) : "");
    }));
    key.replaceChildren(values.length ? scale(low, high, (v) => format(state.key, v)) : el("p", { class: "empty" }, world ? "times are not measured on this device: its host does not wait" : "no rank has reported yet"));
    show();
  }
  function place(ranks, rank) {
    return ranks.at && ranks.at[rank] && ranks.axes.length ? ` (${ranks.axes.map((axis, i) => `${axis} ${ranks.at[rank][i]}`).join(", ")})` : "";
  }
  async function choose(rank) {
    state.rank = state.rank === rank ? null : rank;
    state.calls = null;
    update(last);
    if (state.rank === null) return;
    const found = await last.flight(last.focus, rank);
    if (state.rank === rank) { state.calls = found; show(); }
  }
  function show() {
    if (state.rank === null || !last) { detail.replaceChildren(); return; }
    const ranks = last.run.ranks, facts = ["busy_s", "waited_s", "data_s", "peak_bytes"].filter((name) => ranks[name] && finite(ranks[name][state.rank]));
    const names = { busy_s: "computes", waited_s: "waits", data_s: "waits for data", peak_bytes: "held at most" };
    const calls = (state.calls && state.calls.calls) || [];
    detail.replaceChildren(el("p", { style: { margin: ".7rem 0 .3rem" } }, el("b", {}, `rank ${state.rank}`), place(ranks, state.rank), " · ",
      facts.map((name) => `${names[name]} ${format(name, ranks[name][state.rank])}`).join(" · ")),
    state.calls && state.calls.at ? el("p", { class: "soft", style: { margin: "0 0 .3rem" } }, `it was in ${state.calls.at}`) : "",
    calls.length ? el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("tr", {}, ["call", "axis", "number", "phase", "bytes", "state"].map((n) => el("th", {}, n))),
      calls.map((call) => el("tr", {}, el("td", {}, String(call.op)), el("td", {}, String(call.axis)), el("td", {}, whole(call.number)), el("td", {}, String(call.phase)), el("td", {}, bytes(call.payload)),
        el("td", { class: call.done ? "soft" : "bad" }, call.done ? "done" : `waits ${seconds(call.held_s)}`)))))
      : el("p", { class: "empty" }, state.calls ? "no flight record of this rank was written" : "…"));
  }
  return update;
});

panel("layers", "Layers", "", "By layer and step: the norm of the gradient, the update's norm over the weights' (about 0.001 is usual for a matrix), and the norm of the weights. Colours are logarithmic. Written every run.layers_every steps.", ({ body, sub, tools }) => {
  const state = { key: "grad_norm" }, map = new HeatMap("norms by layer"), key = el("div", {}), none = el("p", { class: "empty" }, "no norms by layer were written: set run.layers_every");
  let last = null;
  tools.append(...choice({ grad_norm: "gradient", update_ratio: "update / weight", weight_norm: "weight" }, "grad_norm", (chosen) => { state.key = chosen; update(last); }));
  body.append(none, map.node, key);
  function update(view) {
    last = view;
    const layers = view.run.layers;
    none.hidden = Boolean(layers);
    map.node.hidden = key.hidden = !layers;
    sub.textContent = layers ? `${layers.names.length} layers` : "";
    if (!layers) return;
    const order = layers.names.map((name, i) => [/^(embedding|token|position|types)/.test(name) ? -1 : /\d/.test(name) ? 0 : 1, i]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, i]) => i);
    map.draw(order.map((i) => layers.names[i]), layers.steps, layers[state.key].map((row) => order.map((i) => row[i])));
    key.replaceChildren(scale(10 ** map.low, 10 ** map.high, (v) => v.toPrecision(2)));
  }
  return update;
});

panel("norm", "Gradient norm", "", "The norm of the whole gradient before clipping, on a logarithmic axis.", ({ body, sub }) => {
  const chart = new LineChart({ height: 190, label: "gradient norm", log: true });
  body.append(chart.node);
  return (view) => {
    chart.draw(view.runs.flatMap((run, number) => (run.series.grad_norm && !view.hidden.has(number)
      ? [{ name: run.name, colour: view.runs.length > 1 ? runColour(number) : colour("p-backward"), x: run.series.step, y: run.series.grad_norm.mean, lo: run.series.grad_norm.lo, hi: run.series.grad_norm.hi }] : [])), marksOf(view.run, "step"));
    sub.textContent = `now ${trimmed(view.run.progress.grad_norm)}`;
  };
});

panel("rate", "Learning rate", "", "The learning rate of each step and, with fp16, the loss scale's own chart below.", ({ body, sub }) => {
  const chart = new LineChart({ height: 190, label: "learning rate", zero: true, format: (v) => (v === 0 ? "0" : v.toExponential(1)) });
  body.append(chart.node);
  return (view) => {
    chart.draw(view.runs.flatMap((run, number) => (run.series.lr && !view.hidden.has(number) ? [{ name: run.name, colour: view.runs.length > 1 ? runColour(number) : colour("good"), x: run.series.step, y: run.series.lr }] : [])));
    sub.textContent = finite(view.run.progress.lr) ? `now ${view.run.progress.lr.toExponential(2)}` : "";
  };
});

panel("spread", "Spread over ranks", "", "How long the quickest, the middle and the slowest rank computed in a step, and how long the mean rank waited for each axis.", ({ body, sub }) => {
  const chart = new LineChart({ height: 190, label: "seconds by rank", zero: true, cut: 0.03, format: seconds }), keys = el("div", {});
  body.append(chart.node, keys);
  return (view) => {
    const d = view.run.details, busy = d.busy_s, series = [];
    if (busy) {
      series.push({ name: "slowest computes", colour: colour("bad"), x: d.step, y: busy.max }, { name: "median computes", colour: colour("accent"), x: d.step, y: busy.median }, { name: "quickest computes", colour: colour("good"), x: d.step, y: busy.min });
    }
    Object.entries(d.exposed).forEach(([axis, y], i) => series.push({ name: `waits for ${axis}`, colour: colour(["p-reduce", "p-backward", "warn", "faint", "ink", "p-rest"][i % 6]), x: d.step, y, dashed: true, thin: true }));
    chart.draw(series);
    keys.replaceChildren(legend(series.map((one) => [one.name, one.colour])));
    sub.textContent = busy ? `slowest now: rank ${busy.rank[busy.rank.length - 1]}` : "not measured on this device";
  };
});

panel("machine", "Machine", "", "The machine of the rank that writes the run, and that rank's device, about every ten seconds: the used shares of cores, memory and device, the device's temperature and power, and the network's traffic.", ({ body, sub, node }) => {
  const shares = new LineChart({ height: 150, label: "used shares", zero: true, xName: "time", xFormat: clock, format: (v) => percent(v, 0) });
  const rates = new LineChart({ height: 110, label: "network", zero: true, xName: "time", xFormat: clock, format: (v) => `${decimal(v)}/s` }), keys = el("div", {}), names = el("div", {});
  body.append(shares.node, keys, rates.node, names);
  return (view) => {
    const m = view.run.machine;
    node.hidden = !(m.time && m.time.length);
    if (node.hidden) return;
    const x = m.time.map((t) => t - m.time[0]), line = (key, name, paint) => (m[key] ? { name, colour: colour(paint), x, y: m[key] } : null);
    const used = [line("cores", "cores", "accent"), line("memory", "memory", "good"), line("device_busy", "device", "valid"), line("device_memory", "device memory", "p-backward")].filter(Boolean);
    const moved = [line("received_per_s", "received", "accent"), line("sent_per_s", "sent", "valid")].filter(Boolean);
    shares.draw(used); keys.replaceChildren(legend(used.map((one) => [one.name, one.colour])));
    rates.draw(moved); names.replaceChildren(legend(moved.map((one) => [one.name, one.colour])));
    const last = (key, format) => { const value = m[key] && m[key][m[key].length - 1]; return finite(value) ? format(value) : null; };
    sub.textContent = [last("device_celsius", (v) => `${v.toFixed(0)} °C`), last("device_watts", (v) => `${v.toFixed(0)} W`)].filter(Boolean).join(" · ");
  };
});

panel("sources", "Data", "", "How many tokens came from each file, by the weights of the blend (which holds them to within one sample at any time), and the last validation loss on each file's samples.", ({ body, sub }) => (view) => {
  const sources = view.run.sources, last = view.run.validations[view.run.validations.length - 1];
  sub.textContent = `${count(view.run.progress.tokens)} tokens, ${whole(view.run.progress.samples)} of ${whole(view.run.progress.all_samples)} samples`;
  if (!sources.length) { body.replaceChildren(el("p", { class: "empty" }, "this run names no token files")); return; }
  const most = Math.max(...sources.map((s) => s.share));
  body.replaceChildren(el("div", { class: "rows" }, sources.map((source, i) => {
    const loss = last && last.sources[source.name];
    return [el("span", { class: "k", title: source.name }, source.name), stackBar({ [source.name]: source.share }, most, { [source.name]: runColour(i) }, (v) => percent(v)),
      el("span", {}, el("b", {}, count(source.tokens)), ` ${percent(source.share)}${finite(loss) ? ` · loss ${fixed(loss, 3)}` : ""}`)];
  })));
});

panel("values", "Monitored", "", "Terms of the loss, values that the program monitors, and of a mixture of experts how many times the mean the busiest expert and rank get.", ({ body, sub, node }) => {
  const charts = new Map();
  return (view) => {
    const d = view.run.details, all = { ...d.losses, ...d.monitored, ...Object.fromEntries(Object.entries(d.experts).map(([k, v]) => [`${{ busiest: "busiest expert", busiest_rank: "busiest rank" }[k] || k} / mean`, v])) };
    const names = Object.keys(all).slice(0, 12);
    node.hidden = !names.length;
    for (const name of names) {
      if (!charts.has(name)) {
        const chart = new LineChart({ height: 120, label: name });
        charts.set(name, chart);
        body.append(el("p", { class: "sub", style: { margin: ".4rem 0 0" } }, name), chart.node);
      }
      charts.get(name).draw([{ name, colour: colour("accent"), x: d.step, y: all[name] }]);
    }
    sub.textContent = names.length ? `${names.length}` : "";
  };
});

panel("about", "About this run", "wide", "What run.json and config.yaml say: with what, where and how the run was made.", ({ body }) => {
  const facts = el("dl", { class: "facts" }), text = el("pre", { tabindex: 0 });
  body.append(facts, el("details", {}, el("summary", {}, "config.yaml, everything resolved"), text));
  return (view) => {
    const { notes, layout, folder, config } = view.run;
    const rows = { folder, command: notes.command, from: notes.from, layout: layout.words, schedule: layout.schedule, model: `${count(layout.parameters)} parameters · ${layout.model} · ${layout.precision}`,
      device: layout.device, host: notes.host, version: notes.version && `meshwright ${notes.version}, torch ${notes.torch}, Python ${notes.python}`, git: notes.git, started: notes.started && when(notes.started) };
    facts.replaceChildren(...Object.entries(rows).filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, name === "command" ? el("code", {}, String(value)) : String(value))]));
    text.textContent = config;
  };
});
