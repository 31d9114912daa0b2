/* Formats numbers, and makes elements without parsing HTML: all values are text nodes, so no value can become markup. */
const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  const drawn = ["svg", "rect", "path", "circle", "line", "text", "g"].includes(tag);
  const node = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

const RUN_COLOURS = ["accent", "valid", "good", "p-backward", "bad", "warn", "faint", "p-data"];
const runColour = (number) => colour(RUN_COLOURS[number % RUN_COLOURS.length]);

const finite = (value) => typeof value === "number" && Number.isFinite(value);
const dash = "–";

function count(value, digits = 3) {
  if (!finite(value)) return dash;
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e15, "Q"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return `${trimmed(value / limit, digits)}${unit}`;
  }
  return trimmed(value, digits);
}

function trimmed(value, digits = 3) {
  if (!finite(value)) return dash;
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1).replace("e", "e");
  const text = value.toPrecision(digits);
  return String(Number(text));
}

function fixed(value, digits) { return finite(value) ? value.toFixed(digits) : dash; }
function whole(value) { return finite(value) ? Math.round(value).toLocaleString("en-US") : dash; }
function percent(value, digits = 1) { return finite(value) ? `${(100 * value).toFixed(digits)} %` : dash; }

/* TFLOP/s as [number, unit], in a unit that fits. */
function flops(value) {
  if (!finite(value)) return [dash, ""];
  for (const [limit, unit] of [[1e6, "EFLOP/s"], [1e3, "PFLOP/s"], [1, "TFLOP/s"], [1e-3, "GFLOP/s"]]) if (value >= limit) return [trimmed(value / limit), unit];
  return [trimmed(value * 1e6), "MFLOP/s"];
}

function bytes(value) {
  if (!finite(value)) return dash;
  let unit = 0;
  while (value >= 999.5 && unit < 5) { value /= 1024; unit += 1; }
  return `${unit ? value.toPrecision(3) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

/* Bytes in powers of 1000, as the ticks of an axis and the rates of networks are written. */
function decimal(value) {
  if (!finite(value)) return dash;
  for (const [size, unit] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= size) return `${trimmed(value / size)} ${unit}`;
  return `${Math.round(value)} B`;
}

function seconds(value) {
  if (!finite(value)) return dash;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Number((1e6 * value).toPrecision(3))} µs`;
  if (value < 1) return `${Number((1e3 * value).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

function clock(value) {
  if (!finite(value)) return dash;
  const total = Math.max(0, Math.round(value));
  const days = Math.floor(total / 86400), hours = Math.floor(total / 3600) % 24, minutes = Math.floor(total / 60) % 60;
  const pad = (n) => String(n).padStart(2, "0");
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours}:${pad(minutes)}:${pad(total % 60)}` : `${minutes}:${pad(total % 60)}`;
}

function when(stamp) {
  if (!finite(stamp)) return dash;
  const date = new Date(1000 * stamp), pad = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

function ago(stamp, now) {
  const gone = now - stamp;
  if (!finite(gone)) return dash;
  if (gone < 90) return `${Math.max(0, Math.round(gone))} s ago`;
  if (gone < 5400) return `${Math.round(gone / 60)} min ago`;
  return gone < 129600 ? `${Math.round(gone / 3600)} h ago` : `${Math.round(gone / 86400)} d ago`;
}

function median(values) {
  const sorted = values.filter(finite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

/* An exponential moving average with the given share for the past, corrected for its start at zero. */
function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!finite(value)) return weight ? mean / weight : null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 2.5, 5, 10].find((n) => n * power >= raw * (1 - 1e-9)) || 10);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const n of Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5]) found.push(n * 10 ** power);
  }
  const inside = found.filter((at) => at >= low * 0.999 && at <= high * 1.001);
  return inside.length > 1 ? inside : ticks(low, high, 4).filter((at) => at > 0);
}
