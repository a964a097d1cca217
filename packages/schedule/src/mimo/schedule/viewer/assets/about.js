// What stands around the timelines: the tip under the pointer, the table of causes, cards and legend.

const total = (sizes) => sizes.reduce((sum, it) => sum + it, 0);
const peakOf = (row) => row.memory.reduce((most, [, sizes]) => Math.max(most, total(sizes)), 0);

function memoryAt(row, moment) {
  let found = null;
  for (const [since, sizes] of row.memory) if (since <= moment) found = sizes;
  if (!found) return "";
  const by = found.map((size, module) => (size ? `${modules[module]} ${bytes(size)}` : "")).filter(Boolean).join(", ");
  return `${bytes(total(found))} saved then${by ? ` (${by})` : ""}`;
}

function showTip(chart, event) {
  const tip = find("tip"), found = chart.under(event);
  tip.hidden = !found;
  if (!found) return;
  const { row, bar, gap } = found, lines = [];
  if (bar) {
    const length = bar[FINISH] - bar[START];
    lines.push(`${bar[KIND]} of ${modules[bar[MODULE]]}, stage ${bar[STAGE]}`);
    if (bar[MICROBATCHES].length) lines.push(`microbatch${bar[MICROBATCHES].length > 1 ? "es" : ""} ${numbers(bar[MICROBATCHES])}`);
    lines.push(`starts at ${seconds(bar[START])}, takes ${seconds(length)}`);
    if (bar[WAITED]) lines.push(`after ${seconds(bar[WAITED])} of ${because(bar[CAUSE])}`);
    lines.push(memoryAt(row, bar[FINISH]));
  } else {
    lines.push(`${because(gap.cause)}: ${seconds(gap.finish - gap.start)}`, `from ${seconds(gap.start)} to ${seconds(gap.finish)}`, memoryAt(row, gap.start));
  }
  const [first, ...others] = lines.filter(Boolean);
  tip.replaceChildren(element("b", "", first), ...[...others, row.name].map((line) => element("div", "", line)));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - width - 8)}px`;
  tip.style.top = `${event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

function bubbles(timeline) {
  const causes = [...new Set(timeline.rows.flatMap((row) => Object.keys(row.idle)))];
  const order = (cause) => (cause === "warm-up" ? -1 : cause === "drain" ? 1 : 0);
  causes.sort((a, b) => order(a) - order(b));
  const details = element("details"), holder = element("div", "table"), table = element("table");
  details.open = timeline.rows.length <= 16;
  details.append(element("summary", "", "time of each row by cause"), holder);
  holder.append(table);
  const line = (cells, tag, className = "") => {
    const made = element("tr", className);
    for (const [text, small] of cells) {
      const cell = element(tag, text === "–" ? "none" : "", text);
      if (small) cell.append(element("small", "", small));
      made.append(cell);
    }
    table.append(made);
  };
  const share = (value) => (value ? [percent(value / timeline.seconds), seconds(value)] : ["–"]);
  const memory = timeline.rows.some((row) => row.memory.length) ? [["peak bytes"]] : [];
  line([[""], ["busy"], ["idle"], ...causes.map((it) => [because(it)]), ...memory], "th");
  for (const row of timeline.rows)
    line([[row.name], share(row.busy), share(total(Object.values(row.idle))), ...causes.map((it) => share(row.idle[it])),
      ...memory.map(() => (row.memory.length ? [bytes(peakOf(row))] : ["–"]))], "td");
  const ranks = timeline.rows.reduce((sum, row) => sum + row.ranks, 0) || 1;
  const mean = (of) => share(timeline.rows.reduce((sum, row) => sum + row.ranks * of(row), 0) / ranks);
  line([["mean of ranks"], mean((row) => row.busy), mean((row) => total(Object.values(row.idle))),
    ...causes.map((it) => mean((row) => row.idle[it] || 0)), ...memory.map(() => [""])], "td", "all");
  return details;
}

function cards() {
  for (const timeline of timelines) {
    const card = element("div", "card"), list = element("dl");
    card.append(element("b", "", timeline.name), list);
    const ranks = timeline.rows.reduce((sum, row) => sum + row.ranks, 0) || 1;
    const busy = timeline.rows.reduce((sum, row) => sum + row.ranks * row.busy, 0) / ranks;
    const facts = [["step", seconds(timeline.seconds)], ["idle, mean of ranks", timeline.seconds ? percent(1 - busy / timeline.seconds) : "–"]];
    const peak = Math.max(0, ...timeline.rows.map(peakOf));
    if (peak) facts.push(["peak of a rank", bytes(peak)]);
    if (timeline !== timelines[0] && timelines[0].seconds) facts.push([`beside ${timelines[0].name}`, `× ${(timeline.seconds / timelines[0].seconds).toFixed(3)}`]);
    for (const [name, value] of facts) {
      const fact = element("div");
      fact.append(element("dt", "", name), element("dd", "", value));
      list.append(fact);
    }
    find("cards").append(card);
  }
}

function legend() {
  const used = new Set(timelines.flatMap((it) => it.rows.flatMap((row) => row.bars.map((bar) => bar[KIND]))));
  const sample = (fill, hatch) => {
    const holder = element("span"), pen = new SvgPen(holder);
    pen.begin(18, 13);
    pen.bar(0, 0, 18, 13, fill, hatch);
    pen.end();
    holder.querySelector(".bar").removeAttribute("class"); // those of the timelines alone are counted
    return holder;
  };
  const parts = modules.map((name, module) => {
    const entry = sample(color(module), false);
    entry.className = "module";
    entry.append(name);
    return entry;
  });
  parts.push(element("i"));
  for (const kind of PARTS.filter((it) => used.has(it))) {
    const entry = sample(fillOf(kind, theme.soft), hatched(kind));
    entry.append(kind);
    parts.push(entry);
  }
  parts.push(element("i"), element("span", "", "line: a wait, coloured by the module waited for"));
  find("legend").replaceChildren(...parts);
}
