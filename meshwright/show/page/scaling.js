/* The page of `meshwright scaling`: for each mode, throughput, efficiency and communication over the devices. */
const scaling = JSON.parse(document.getElementById("data").textContent);
const WAY_PAINTS = { hybrid: "ink", data: "accent", tensor: "p-reduce", pipeline: "p-optimizer" };
const AXIS_PAINTS = { tp: "p-reduce", cp: "warn", ep: "bad", etp: "p-data", dp: "accent", edp: "p-backward", pp: "p-optimizer", embedding: "p-backward" };
const nameOf = (p) => (p.way === "hybrid" ? el("b", {}, "best\u00a0mix") : p.way);
const hybridFirst = (ways) => [...ways].sort((a, b) => (b === "hybrid") - (a === "hybrid"));

/* The lines of one mode by way of scaling. The best mix is a wide line below the others, since it often is one of them. */
function byWay(points, value) {
  return hybridFirst([...new Set(points.map((p) => p.way))]).map((way) => {
    const found = points.filter((p) => p.way === way && finite(value(p)));
    return { name: way === "hybrid" ? "best mix" : way, colour: colour(WAY_PAINTS[way]), wide: way === "hybrid", points: true, x: found.map((p) => p.devices), y: found.map(value) };
  });
}

/* The same by way and axis: colours stand for axes, and the wide lines are those of the best mix. */
function byAxis(points, key) {
  return hybridFirst([...new Set(points.map((p) => p.way))]).flatMap((way) => Object.keys(AXIS_PAINTS).map((axis) => {
    const found = points.filter((p) => p.way === way && p[key] && p[key][axis] > 0);
    return { name: `${way === "hybrid" ? "best mix" : way}, ${axis}`, axis, colour: colour(AXIS_PAINTS[axis]), wide: way === "hybrid", points: true, x: found.map((p) => p.devices), y: found.map((p) => p[key][axis]) };
  })).filter((one) => one.x.length);
}

function lines(id, title, explanation, options, series, keys) {
  panel(id, title, "", explanation, ({ body }) => {
    const chart = new LineChart({ height: 260, label: title, xName: "devices", xLog: true, ...options }), key = el("div", {});
    body.append(chart.node, key);
    return () => { const found = series(); chart.draw(found); key.replaceChildren(legend(keys(found))); };
  });
}

const wayKeys = (found) => found.filter((one) => one.x.length).map((one) => [one.wide ? `${one.name} (the wide line)` : one.name, one.colour]);
const axisKeys = (found) => [...new Set(found.map((one) => one.axis))].map((axis) => [axis, colour(AXIS_PAINTS[axis])]).concat(found.some((one) => one.wide) ? [["wide lines: the best mix", colour("p-rest")]] : []);

for (const [mode, points] of Object.entries(scaling.modes)) {
  const name = mode === "weak" ? "Weak scaling" : "Strong scaling", what = mode === "weak" ? "The batch grows with the devices." : "The batch stays the same.";
  lines(`${mode}-speed`, `${name}: throughput`, `${what} Tokens per second of all devices, for the best layout of each kind. Both axes are logarithmic.`, { log: true, format: count }, () => byWay(points, (p) => p.tokens_per_s), wayKeys);
  lines(`${mode}-efficiency`, `${name}: efficiency`, `${what} Throughput of a device relative to the best on the fewest devices that fit.`, { zero: true, format: (v) => percent(v, 0) }, () => byWay(points, (p) => p.efficiency), wayKeys);
  lines(`${mode}-bytes`, `${name}: what a device sends in a step`, "The bytes by axis of the layout, on a logarithmic axis.", { log: true, format: decimal }, () => byAxis(points, "bytes_by_axis"), axisKeys);
  lines(`${mode}-exposed`, `${name}: exposed communication in a step`, "The seconds of a step for which computation waits, by axis of the layout.", { zero: true, format: seconds }, () => byAxis(points, "exposed_s_by_axis"), axisKeys);
  panel(`${mode}-layouts`, `${name}: layouts`, "wide", `${what} The best layout of each kind on each number of devices.`, ({ body }) => {
    body.append(cardTable(["way", "devices", "batch", "tokens/s", "efficiency", "exposed", "step", "layout"], points.map((p) => finite(p.tokens_per_s)
      ? [nameOf(p), whole(p.devices), whole(p.global_batch), whole(p.tokens_per_s), percent(p.efficiency).replace(" ", "\u00a0"), percent(p.comm_share).replace(" ", "\u00a0"), seconds(p.step_time_s).replace(" ", "\u00a0"), p.words]
      : [nameOf(p), whole(p.devices), whole(p.global_batch), dash, dash, dash, dash, "not possible, or does not fit"])));
    return () => {};
  });
}

const head = el("div", {}, el("div", { class: "top" }, el("h1", {}, scaling.title)), facts(scaling.facts));
function update() { for (const one of panels) one.update(); }
frame([el("span", { class: "room" })], [head, el("div", { class: "grid", style: { marginTop: "1rem" } }, panels.map((one) => one.node)), el("p", { class: "foot" }, "all figures are predicted · this page requests nothing else")]);
update();
document.documentElement.dataset.ready = "yes";
