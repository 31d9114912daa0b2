/* The frame that all pages share: the bar with the logo and the button for colours, tiles, panels and their buttons.
   A page defines `update()`, which draws everything again. */
function logo() {
  const dots = [[3, 3], [17, 3], [3, 17], [17, 17], [10, 10]].map(([x, y]) => el("circle", { cx: x, cy: y, r: 2.6, fill: "currentColor" }));
  return el("svg", { viewBox: "0 0 20 20", width: 20, height: 20, style: { color: colour("accent") } }, el("path", { d: "M3 3h14v14H3zM3 3l14 14M17 3L3 17", fill: "none", stroke: "currentColor", "stroke-width": 1.1, opacity: 0.55 }), dots);
}

function themeButton() {
  const order = ["", "dark", "light"], names = { "": "auto", dark: "dark", light: "light" };
  let now = "";
  try { now = localStorage.getItem("theme") || ""; } catch { /* a page opened as a file may have no storage */ }
  const button = el("button", { type: "button", "aria-label": "colours", onclick: () => { now = order[(order.indexOf(now) + 1) % 3]; set(); update(); } });
  function set() {
    if (now) document.documentElement.dataset.theme = now; else delete document.documentElement.dataset.theme;
    button.textContent = { "": "◐", dark: "●", light: "○" }[now];
    button.title = `colours: ${names[now]}`;
    try { localStorage.setItem("theme", now); } catch { /* the choice is then forgotten */ }
  }
  set();
  return button;
}

function tile(name, value, unit, below, kind) {
  return el("div", { class: "tile" }, el("div", { class: "k" }, name), el("div", { class: "v" }, value, unit && el("small", {}, unit)), el("div", { class: `n ${kind || ""}` }, below || "\u00a0"));
}

const panels = [];

function panel(id, title, size, explanation, make) {
  const body = el("div", {}), sub = el("span", { class: "sub" }), tools = el("div", { class: "tools" });
  const text = el("p", { class: "explain", hidden: true }, explanation);
  const why = el("button", { class: "why", type: "button", "aria-label": `what ${title} shows`, onclick: () => { text.hidden = !text.hidden; } }, "?");
  const node = el("section", { class: `panel ${size}`, id, "aria-label": title },
    el("header", {}, el("h2", {}, title), sub, el("span", { class: "room" }), tools, why), text, body);
  const update = make({ body, sub, tools, node });
  panels.push({ id, node, update });
}

function toggle(name, on, change) {
  const button = el("button", { type: "button", class: on ? "on" : "", "aria-pressed": String(on) }, name);
  button.addEventListener("click", () => {
    on = !on;
    button.classList.toggle("on", on);
    button.setAttribute("aria-pressed", String(on));
    change(on);
  });
  return button;
}

function choice(names, chosen, change) {
  const buttons = Object.entries(names).map(([key, name]) => el("button", { type: "button", class: key === chosen ? "on" : "", onclick: () => {
    buttons.forEach((b, i) => b.classList.toggle("on", Object.keys(names)[i] === key));
    change(key);
  } }, name));
  return buttons;
}

/* Facts by name. */
function facts(rows) {
  return el("dl", { class: "facts" }, Object.entries(rows).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, name === "command" ? el("code", {}, value) : value)]));
}

/* A table whose rows become cards on a phone: each cell then shows its column's name. */
function cardTable(names, rows, marked) {
  return el("table", { class: "cards" }, el("thead", {}, el("tr", {}, names.map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.map((cells, number) => el("tr", { class: number === marked ? "marked" : "" }, cells.map((cell, column) => el("td", { "data-name": names[column] }, cell))))));
}

/* Put the page together: the bar, and everything of `main`. */
function frame(inBar, inMain) {
  document.getElementById("bar").append(el("div", { class: "brand" }, logo(), el("b", {}, "Meshwright")), ...inBar, themeButton());
  document.getElementById("main").append(...inMain);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update());
}
