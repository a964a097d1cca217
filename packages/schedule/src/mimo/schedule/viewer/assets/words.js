// The page's data, and how its numbers, causes and parts are written and coloured.

const { modules, timelines } = JSON.parse(document.getElementById("data").textContent);
const [KIND, MODULE, STAGE, MICROBATCHES, START, FINISH, WAITED, CAUSE] = [0, 1, 2, 3, 4, 5, 6, 7];
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#a89200"]; // Okabe and Ito, 2008
const PARTS = ["forward", "backward", "input-gradient", "weight-gradient", "reduce"];
const SVG_BARS = 6000, AXIS = 22, LETTER = 6.6, NEAREST = 1e-6;

const whole = Math.max(...timelines.map((it) => it.seconds), 0) || 1;
const view = { start: 0, finish: whole };
const options = { memory: true, messages: false };
const find = (id) => document.getElementById(id);
const color = (module) => PALETTE[module % PALETTE.length];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
const escaped = (text) => String(text).replace(/[&<>"']/g, (it) => `&#${it.charCodeAt(0)};`);

function seconds(value, of = value) {
  const [factor, unit] = Math.abs(of) >= 1 || of === 0 ? [1, "s"] : Math.abs(of) >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((value * factor).toPrecision(4))} ${unit}`;
}
function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  return `${value} B`;
}
const percent = (share) => `${(100 * share).toFixed(1)} %`;
function numbers(list) {
  if (list.length < 2) return list.join();
  const run = list.every((it, at) => !at || it === list[at - 1] + 1);
  return run ? `${list[0]}–${list[list.length - 1]}` : list.join();
}
const because = (cause) => (cause === "warm-up" || cause === "drain" ? cause : cause === "peers" ? "waiting for peers"
  : modules.includes(cause) ? `waiting for ${cause}` : cause);

let theme;
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = Object.fromEntries(["ink", "soft", "grid", "idle", "stripe", "tint", "reduce"].map((it) => [it, style.getPropertyValue(`--${it}`).trim()]));
}
function mix(first, second, share) {
  const parts = (it) => [1, 3, 5].map((at) => parseInt(it.slice(at, at + 2), 16));
  const [a, b] = [parts(first), parts(second)];
  return "#" + a.map((it, at) => Math.round(it * share + b[at] * (1 - share)).toString(16).padStart(2, "0")).join("");
}
const fillOf = (kind, base) => mix(base, kind === "reduce" ? theme.reduce : theme.tint,
  { forward: 0.42, "input-gradient": 0.74, reduce: 0.25 }[kind] || 1);
function inkOn(fill) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151f" : "#ffffff";
}
const causeColor = (cause) => (modules.includes(cause) ? color(modules.indexOf(cause)) : cause === "transfer" ? theme.soft : theme.idle);
const hatched = (kind) => kind === "weight-gradient";
