/* Puts the page together, and keeps it up to date. */
const given = JSON.parse(document.getElementById("data").textContent);
const live = document.documentElement.dataset.mode === "live";
const view = { runs: given.runs, plans: given.plans || [], focus: 0, hidden: new Set(), live, version: null, heard: Date.now(), lost: false };
/* Curves of more than a few runs are hard to tell apart, so the older ones are hidden until they are asked for. */
const SHOWN_AT_FIRST = 4;
[...view.runs.keys()].sort((a, b) => (view.runs[b].notes.started || 0) - (view.runs[a].notes.started || 0)).slice(SHOWN_AT_FIRST).forEach((number) => view.hidden.add(number));
if (view.hidden.has(0)) view.focus = [...view.runs.keys()].find((number) => !view.hidden.has(number));
view.show = (number, on) => { if (on) view.hidden.delete(number); else view.hidden.add(number); update(); };
view.choose = async (number) => { view.focus = number; view.hidden.delete(number); update(); if (live && !view.plans[number]) { await getPlan(); update(); } };

view.flight = async (run, rank) => {
  if (!live) return (given.flights[run] || {})[rank] || { calls: [] };
  try { return await (await fetch(`/flight.json?run=${run}&rank=${rank}`)).json(); } catch { return { calls: [] }; }
};

const chips = el("div", { class: "chips" }), note = el("span", { class: "note" }), top_ = el("div", {}), alerts = el("ul", { class: "alerts" }), tiles = el("div", { class: "tiles" });

function drawChips() {
  if (view.runs.length < 2) { chips.replaceChildren(); return; }
  chips.replaceChildren(...view.runs.map((run, number) => el("button", { type: "button", class: `chip ${number === view.focus ? "on" : ""}`, title: `${run.folder} (double-click hides it)`,
    onclick: () => view.choose(number), ondblclick: () => view.show(number, false) },
  el("i", { class: "dot", style: { background: view.hidden.has(number) ? "transparent" : runColour(number), border: `2px solid ${runColour(number)}` } }), el("span", {}, run.name))));
}

function drawTop(run) {
  const p = run.progress, l = run.layout, share = p.steps ? p.step / p.steps : 0;
  const left = finite(p.seconds_left) && run.state.kind === "running" ? `${clock(p.seconds_left)} left, done about ${when(run.now + p.seconds_left)}` : ["hung", "failed", "gone", "silent"].includes(run.state.kind) ? "" : run.state.text;
  top_.replaceChildren(
    el("div", { class: "top" }, el("h1", {}, run.name), el("span", { class: `pill ${run.state.kind}` }, run.state.kind)),
    el("p", { class: "about" }, el("b", {}, `${count(l.parameters)} parameters`), ` · ${l.model} · ${l.precision} on ${l.device}`, l.words ? ` · ${l.words}` : "", l.schedule ? ` · ${l.schedule}` : ""),
    el("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-label": "steps done" }, el("i", { style: { width: `${100 * share}%` } })),
    el("div", { class: "below" }, el("span", {}, `step ${whole(p.step)} of ${whole(p.steps)} · ${percent(share, share < 0.1 ? 1 : 0)}`), el("span", {}, left)));
  document.title = `${finite(p.loss) ? `${fixed(p.loss, 3)} · ` : ""}${run.name} · Meshwright`;
}

function drawTiles(run, plan) {
  const p = run.progress, v = run.validations[run.validations.length - 1], mean = run.series.loss ? run.series.loss.mean : [];
  const before = median(mean.slice(Math.floor(mean.length * 0.85), Math.floor(mean.length * 0.9))), now = median(mean.slice(-Math.max(1, Math.floor(mean.length * 0.05))));
  const change = finite(before) && finite(now) && mean.length >= 20 ? now - before : null;
  const cost = finite(p.price_hour) ? (p.price_hour * p.seconds_left) / 3600 : null;
  const gone = finite(p.price_hour) ? (p.price_hour * p.trained_s) / 3600 : null;
  const peak = run.details.peak_bytes && run.details.peak_bytes.max[run.details.peak_bytes.max.length - 1];
  tiles.replaceChildren(...[
    tile("loss", fixed(p.loss, 4), null, finite(change) ? `${change > 0 ? "▲" : "▼"} ${Math.abs(change).toPrecision(2)} lately` : "", change > 0 ? "up" : "down"),
    tile("validation", v ? fixed(v.loss, 4) : dash, null, v ? `at step ${whole(v.step)}` : "none yet"),
    tile("speed", count(p.tokens_per_s), "tokens/s", `${p.counted ? `${p.counted} · ` : ""}${run.layout.world > 1 ? `${count(p.tokens_per_s / run.layout.world)} per rank` : `${count(p.tokens)} tokens so far`}`),
    finite(p.mfu) ? tile("MFU", percent(p.mfu), null, `${flops(p.tflops).join(" ")} of the model`) : tile("model", ...flops(p.tflops), finite(p.tflops) ? "MFU: the peak is unknown" : "not recorded"),
    tile("step time", seconds(p.step_time_s), null, plan && plan.step && !plan.hint ? `planned ${seconds(plan.step.step_s)}` : `${clock(p.trained_s)} trained`),
    tile("time to finish", p.step >= p.steps ? "done" : run.state.kind === "running" ? clock(p.seconds_left) : dash, null, `${count(p.tokens)} of ${count((p.tokens / Math.max(1, p.samples)) * p.all_samples)} tokens`),
    finite(cost) ? tile("cost to finish", `$${count(cost)}`, null, `$${count(gone)} so far, at $${count(p.price_hour)}/h`) : null,
    tile("memory", bytes(peak), null, run.layout.device === "cpu" ? "the largest process" : plan && plan.memory ? `planned ${bytes(plan.memory.peak)}` : "the fullest rank"),
  ].filter(Boolean));
}

function drawAlerts(run, plan) {
  const found = [...run.alerts];
  const wrong = plan && plan.comm ? Object.entries(plan.comm).filter(([, c]) => c.differs_at) : [];
  if (wrong.length) found.unshift({ level: "bad", text: `the bytes over ${wrong.map(([axis]) => axis).join(", ")} are not what was planned`, panel: "bytes" });
  alerts.replaceChildren(...found.map((alert) => el("li", {}, el("button", { type: "button", class: alert.level, onclick: () => document.getElementById(alert.panel).scrollIntoView({ behavior: "smooth" }) }, alert.text))));
}

function update() {
  view.run = view.runs[view.focus];
  view.plan = view.plans[view.focus];
  drawChips(); drawTop(view.run); drawTiles(view.run, view.plan); drawAlerts(view.run, view.plan);
  for (const one of panels) one.update(view);
}

function tell() {
  if (!live) { note.textContent = `written ${when(view.runs[0].now)}`; return; }
  note.textContent = view.lost ? "the server is gone" : `updated ${Math.max(0, Math.round((Date.now() - view.heard) / 1000))} s ago`;
}

async function getPlan() {
  const number = view.focus, plan = await fetch(`/plan.json?run=${number}`);
  if (plan.ok) view.plans[number] = await plan.json();
}

async function poll() {
  try {
    const answer = await fetch("/data.json", { headers: view.version ? { "If-None-Match": view.version } : {} });
    view.lost = !(answer.ok || answer.status === 304);
    if (answer.ok) { view.runs = await answer.json(); view.version = answer.headers.get("ETag"); }
    if (answer.ok || !view.plans[view.focus]) await getPlan();
    if (answer.ok) { view.heard = Date.now(); update(); } else if (answer.status === 304) { view.heard = Date.now(); drawTop(view.run); }
  } catch { view.lost = true; }
  tell();
  setTimeout(poll, document.hidden ? 15000 : 2500);
}

frame([chips, el("span", { class: "room" }), note], [top_, alerts, tiles, el("div", { class: "grid" }, panels.map((one) => one.node)), el("p", { class: "foot" }, "made from the run's folder alone · this page requests nothing else")]);
update();
tell();
if (live) { poll(); setInterval(tell, 1000); }
document.documentElement.dataset.ready = "yes";
