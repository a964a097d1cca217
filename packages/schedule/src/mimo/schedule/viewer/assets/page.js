// The view that all timelines share, and the beginning of the page.

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    charts.forEach((chart) => chart.draw());
  });
}
function show(start, finish) {
  const span = Math.min(Math.max(finish - start, whole * NEAREST), whole);
  view.start = Math.min(Math.max(start, 0), whole - span);
  view.finish = view.start + span;
  redraw();
}
function zoom(factor, at = 0.5) {
  const span = view.finish - view.start, kept = view.start + at * span;
  show(kept - at * span * factor, kept + (1 - at) * span * factor);
}
const move = (by) => show(view.start + by, view.finish + by);

readTheme();
legend();
cards();
const charts = timelines.map((it) => new Chart(it, find("timelines")));
// All charts begin at one place, so that times stand under one another.
function arrange() {
  charts.forEach((chart) => (chart.labels.style.minWidth = ""));
  charts.forEach((chart) => chart.arrange());
  const widest = Math.max(0, ...charts.map((chart) => chart.labels.offsetWidth));
  charts.forEach((chart) => (chart.labels.style.minWidth = `${widest}px`));
  charts.forEach((chart) => chart.draw());
}
arrange();
for (const name of ["memory", "messages"]) {
  const box = find(name);
  box.checked = options[name];
  box.addEventListener("change", () => {
    options[name] = box.checked;
    arrange();
  });
}
find("memory").parentElement.hidden = !charts.some((chart) => chart.hasMemory);
find("messages").parentElement.hidden = !timelines.some((it) => it.transfers.length);
find("in").addEventListener("click", () => zoom(0.6));
find("out").addEventListener("click", () => zoom(1 / 0.6));
find("whole").addEventListener("click", () => show(0, whole));
window.addEventListener("keydown", (event) => {
  const step = (view.finish - view.start) / 8;
  const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, whole), ArrowLeft: () => move(-step), ArrowRight: () => move(step) };
  if (keys[event.key] && !event.ctrlKey && !event.metaKey) keys[event.key]();
});
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readTheme();
  legend();
  redraw();
});
document.documentElement.dataset.drawn = "true";
