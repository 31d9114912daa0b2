/* The page of a plan: the question, the answer, pictures of the mesh and of the step, and the refused layouts. */
const plan = JSON.parse(document.getElementById("data").textContent), best = plan.ranking[0];
const gib = (value) => (finite(value) ? `${value.toFixed(1)}\u00a0GiB` : dash), nb = (text) => text.replaceAll(" ", "\u00a0");
const days = (value) => (!finite(value) ? dash : value >= 2 ? `${trimmed(value)} days` : `${trimmed(24 * value)} hours`);
const dollars = (value) => (finite(value) ? `$${whole(value)}` : dash);
const PARTS = ["compute", "optimizer", "idle", "tp", "cp", "ep", "etp", "dp", "edp", "pp", "embedding", "replicas", "waiting and the rest"];
const PART_PAINTS = ["p-forward", "p-optimizer", "p-rest", "p-reduce", "warn", "bad", "faint", "p-backward", "valid", "good", "p-data", "accent", "faint"];
const MEMORY_PAINTS = ["p-forward", "good", "p-backward", "bad", "p-reduce", "warn", "faint", "p-data", "p-rest", "accent"];

panel("question", "The question", "two", "What was asked, and with what this page was made. The command makes it again.", ({ body }) => {
  body.append(facts(plan.facts));
  return () => {};
});

panel("why", "Why this layout", "third", "What the planner found, in words.", ({ body }) => {
  body.append(el("ul", { class: "reasons" }, plan.reasons.map((reason) => el("li", {}, reason))));
  return () => {};
});

panel("mesh", "The mesh", "", "The ranks by pipeline stage, in groups of data-parallel replicas. Each square is one device: tp is across and cp is down. Its colour says on which node it is.", ({ body, sub }) => {
  const { sizes, node, replicas, numbers, layers, drawing, world } = plan.mesh;
  const shown = Object.entries(sizes).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`);
  sub.textContent = `${whole(world)} devices${shown.length ? ` = ${shown.filter((word) => !word.startsWith("ep")).join(" × ")}` : ""}`;
  const row = el("div", { class: "mesh" }), key = el("p", { class: "sub" });
  body.append(row, key, el("details", {}, el("summary", {}, "every rank and every group"), el("pre", { tabindex: 0 }, drawing)));
  return () => {
    const nodes = [...new Set(replicas.flat(2).filter(finite).map((rank) => Math.floor(rank / node)))];
    const paints = ["accent", "valid", "good", "p-backward", "warn", "bad", "p-data"], paint = (rank) => colour(paints[nodes.indexOf(Math.floor(rank / node)) % paints.length]);
    const cell = (rank) => (rank === null ? el("span", {}, "…") : el("i", { title: `rank ${rank}, node ${Math.floor(rank / node)}`, style: { background: paint(rank) } }));
    row.replaceChildren(...numbers.flatMap((stage, i) => {
      if (stage === null) return [el("div", { class: "between" }, "…")];
      const boxes = replicas.map((stages) => el("div", { class: "cells", style: { gridTemplateColumns: `repeat(${Math.min(sizes.tp, stages[i].length)}, 1.15rem)` } }, stages[i].map(cell)));
      const more = sizes.dp > replicas.length ? el("span", { class: "sub" }, `and ${whole(sizes.dp - replicas.length)} more`) : null;
      const box = el("div", { class: "stage" }, el("b", {}, sizes.pp > 1 ? `stage ${stage}` : "all layers"), el("span", { class: "sub" }, `${layers[stage]} layers`), el("div", { class: "copies" }, boxes, more));
      return i ? [el("div", { class: "between" }, "→"), box] : [box];
    }));
    const copies = sizes.dp > 1 ? `Each of the ${whole(sizes.dp)} groups is a data-parallel replica. ` : "";
    key.textContent = `Each square is a device, and its colour is its node of ${node}. ${copies}${plan.answer.words[0].toUpperCase()}${plan.answer.words.slice(1)}.`;
  };
});

panel("step", "One step", "", "Where the seconds of a step go on the busiest rank, and the schedule of the pipeline: blue is forward, violet backward, orange weight gradients, green what follows. What is empty is the bubble.", ({ body, sub }) => {
  const bars = el("div", { class: "rows" }), keys = el("div", {}), line = new Timeline("the simulated step"), text = el("p", { class: "sub", style: { margin: ".6rem 0 .3rem" } });
  const { spans, shown, micro_batches: all, bubble } = plan.step;
  body.append(bars, keys, text, line.node);
  sub.textContent = seconds(best.step_s);
  text.textContent = `${all > shown ? `the first ${shown} of ${whole(all)} micro-batches` : all === 1 ? "one micro-batch" : `${all} micro-batches`}, bubble ${percent(bubble)}`;
  return () => {
    const paints = Object.fromEntries(PARTS.map((name, i) => [name, colour(PART_PAINTS[i])]));
    const used = Object.entries(best.parts).filter(([, value]) => value > 0);
    bars.replaceChildren(stackBar(Object.fromEntries(used), best.step_s, paints, seconds));
    bars.style.gridTemplateColumns = "1fr";
    keys.replaceChildren(legend(used.map(([name, value]) => [`${name} ${seconds(value)} (${percent(value / best.step_s, 0)})`, paints[name]])));
    line.draw(spans, Math.max(...spans.map((span) => span[4])));
  };
});

panel("whatif", "Other devices, other networks", "wide", "The best of the ranking's layouts with another number of devices and another network between nodes, each computed by the planner when this page was written. The batch stays the same, and no new search is made: `meshwright plan` with other devices may find a better layout.", ({ body, sub }) => {
  const { devices, networks, cells, at } = plan.sliders, now = [...at];
  const slider = (name, axis, values) => el("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: at[axis], "aria-label": name, oninput: (event) => { now[axis] = Number(event.target.value); show(); } });
  const texts = [el("b", {}), el("b", {})], answer = el("div", { class: "tiles" }), layout = el("p", { class: "about" });
  body.append(el("div", { class: "sliders" },
    el("label", {}, el("span", {}, "devices"), slider("devices", 0, devices), texts[0]),
    el("label", {}, el("span", {}, "network of a node"), slider("network", 1, networks), texts[1])), answer, layout);
  function show() {
    const cell = cells[now[0]][now[1]], own = cells[at[0]][at[1]];
    texts[0].textContent = whole(devices[now[0]]);
    texts[1].textContent = `${trimmed(8 * networks[now[1]])} Gbit/s`;
    const moved = now[0] !== at[0] || now[1] !== at[1], off = finite(cell.step_s) ? cell.step_s / own.step_s - 1 : null;
    sub.textContent = moved ? "" : "as planned";
    if (!finite(cell.step_s)) { answer.replaceChildren(tile("step time", dash, null, "none of the layouts fits there")); layout.textContent = "None of the ranking's layouts divides or fits these devices."; return; }
    answer.replaceChildren(...[
      tile("step time", seconds(cell.step_s), null, moved ? `${off >= 0 ? "+" : ""}${percent(off)}` : "as planned", off > 0.0005 ? "up" : "down"),
      tile("speed", count(cell.tokens_per_s), "tokens/s", `${count(cell.tokens_per_s / devices[now[0]])} per device`), tile("MFU", percent(cell.mfu), null, ""),
      finite(cell.days) ? tile("whole run", days(cell.days), null, `${count(cell.energy_mwh)} MWh`) : null, finite(cell.cost_usd) ? tile("cost", dollars(cell.cost_usd), null, "at the assumed price") : null].filter(Boolean));
    layout.textContent = cell.layout;
  }
  return show;
});

panel("memory", "Memory", "", "What the fullest rank of the best layout needs on its device, by kind. The parts add up to the whole, and the numbers are those of `meshwright memory` and `meshwright cost`.", ({ body, sub }) => {
  const room = el("div", {});
  body.append(room);
  return () => {
    const kinds = Object.entries(best.memory).filter(([, value]) => value > 0.005), total = Object.values(best.memory).reduce((a, b) => a + b, 0);
    const paints = Object.fromEntries(Object.keys(best.memory).map((name, i) => [name, colour(MEMORY_PAINTS[i % MEMORY_PAINTS.length])]));
    sub.textContent = `${gib(total)} of the device's ${gib(plan.device_gib)}`;
    room.replaceChildren(stackBar(Object.fromEntries(kinds), Math.max(plan.device_gib, total), paints, gib),
      el("table", { class: "sums" }, kinds.map(([name, value]) => el("tr", {}, el("td", {}, el("i", { class: "dot", style: { background: paints[name] } }), ` ${name}`), el("td", {}, gib(value)))),
        el("tr", { class: "total" }, el("td", {}, "together"), el("td", {}, gib(total))), el("tr", {}, el("td", {}, "the plan may use"), el("td", {}, gib(plan.limit_gib))), el("tr", {}, el("td", {}, "the device has"), el("td", {}, gib(plan.device_gib)))));
  };
});

panel("sent", "Communication", "", "What one rank of the fullest stage sends over each axis in a step, and for how long computation waits for it.", ({ body }) => {
  if (!plan.communication.length) body.append(el("p", { class: "empty" }, "one device sends nothing"));
  else body.append(cardTable(["axis", "sends", "takes", "of it exposed"], plan.communication.map((c) => [el("b", {}, c.axis), bytes(c.bytes), c.seconds ? seconds(c.seconds) : dash, c.seconds ? seconds(c.exposed) : dash])));
  return () => {};
});

panel("ranking", "Ranking", "wide", "The best layouts that fit, the fastest first. Where the others lose their time is in the last column.", ({ body, sub }) => {
  sub.textContent = `the first ${plan.ranking.length}`;
  body.append(cardTable(["#", "layout", "step", "tokens/s/device", "MFU", "bubble", "memory", "loses against the best"], plan.ranking.map((row, i) => [
    String(i + 1), row.layout, el("b", {}, nb(seconds(row.step_s))), whole(row.tokens_per_s_device), nb(percent(row.mfu)), nb(percent(row.bubble)), gib(row.memory_gib), row.loses]), 0));
  return () => {};
});

panel("refused", "Why not my layout?", "wide", "For every tp and pp, the best step that was found, or why there is none: too much memory, too slow to be examined, or a rule of the config. Click a cell for the reason. `meshwright plan ... --why layout.tp=8 layout.pp=2` asks about any other keys.", ({ body, sub }) => {
  const { tp, pp, cells } = plan.outcomes, answer = el("p", { class: "sub", "aria-live": "polite" }, "Click a cell for the reason."), grid = el("div", { class: "scroll", tabindex: 0 });
  sub.textContent = "the best step for every tp and pp";
  body.append(...plan.asked.map((one) => el("p", { class: "asked" }, el("code", {}, one.words), " ", one.answer)), grid, answer);
  return () => {
    grid.replaceChildren(el("table", { class: "grid-table" }, el("tr", {}, el("th", {}, ""), pp.map((n) => el("th", {}, `pp ${n}`))),
      tp.map((n, i) => el("tr", {}, el("th", {}, `tp ${n}`), cells[i].map((cell, j) => el("td", {}, cell.text ? el("button", { type: "button", class: cell.kind, title: cell.why,
        style: cell.kind === "fits" ? { background: `color-mix(in srgb, ${colour("good")} ${Math.round(Math.max(6, 60 / cell.ratio ** 3))}%, ${colour("card")})` } : {},
        onclick: () => answer.replaceChildren(el("b", {}, `tp ${n}, pp ${pp[j]}: `), cell.why) }, cell.text) : ""))))));
  };
});

panel("trust", "What this rests on", "wide", "The assumptions behind the numbers. Correct them in a cluster file of your own, or measure them with `meshwright comm bench`.", ({ body }) => {
  body.append(el("p", {}, plan.error), facts(plan.assumptions));
  return () => {};
});

const head = el("div", {}), tiles = el("div", { class: "tiles" });
function update() {
  const a = plan.answer;
  head.replaceChildren(el("div", { class: "top" }, el("h1", {}, plan.title)), el("p", { class: "about" }, el("b", {}, a.layout)), el("p", { class: "about" }, `${a.words}.`));
  tiles.replaceChildren(...[
    tile("step time", seconds(a.step_s), null, `${percent(best.bubble)} bubble`), tile("speed", count(a.tokens_per_s), "tokens/s", `${count(a.tokens_per_s_device)} per device`),
    tile("MFU", percent(a.mfu), null, `HFU ${percent(a.hfu)}`), tile("memory", gib(best.memory_gib), null, `of ${gib(plan.device_gib)}`),
    finite(a.days) ? tile("whole run", days(a.days), null, `${whole(a.steps)} steps`) : null, finite(a.cost_usd) ? tile("cost", dollars(a.cost_usd), null, `${count(a.device_hours)} device hours`) : null,
    finite(a.energy_mwh) ? tile("energy", trimmed(a.energy_mwh), "MWh", "of the devices") : null].filter(Boolean));
  for (const one of panels) one.update();
}
frame([el("span", { class: "room" })], [head, tiles, el("div", { class: "grid" }, panels.map((one) => one.node)), el("p", { class: "foot" }, "all figures are predicted · this page requests nothing else")]);
update();
document.documentElement.dataset.ready = "yes";
