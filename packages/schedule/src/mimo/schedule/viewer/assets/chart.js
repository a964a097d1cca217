// One timeline: its rows of bars, waits and memory, drawn for what the view shows, and what lies under the pointer.

class Chart {
  constructor(timeline, main) {
    this.timeline = timeline;
    this.stages = timeline.rows.map((row) => modules.map((_, module) =>
      [...new Set(row.bars.filter((bar) => bar[MODULE] === module).map((bar) => bar[STAGE]))].sort((a, b) => a - b)));
    this.drawn = timeline.rows.reduce((sum, row) => sum + row.bars.length, 0);
    this.hasMemory = timeline.rows.some((row) => row.memory.length);
    this.peak = Math.max(1, ...timelines.flatMap((it) => it.rows.map(peakOf)));
    const section = (this.section = element("section"));
    section.dataset.bars = timeline.bars; // what tests read back
    section.dataset.rows = timeline.rows.length;
    const heading = element("h2", "", timeline.name);
    heading.append(element("small", "", `${timeline.rows.length} rows, ${timeline.bars} bars`));
    this.scroll = element("div", "scroll");
    const frame = element("div", "frame");
    this.axis = element("div", "axis");
    this.labels = element("div", "labels");
    this.plot = element("div", "plot");
    this.plot.tabIndex = 0;
    frame.append(element("div", "axis"), this.axis, this.labels, this.plot);
    this.scroll.append(frame);
    section.append(heading, this.scroll, bubbles(timeline));
    main.append(section);
    this.onCanvas = this.drawn > SVG_BARS;
    section.dataset.pen = this.onCanvas ? "canvas" : "svg";
    this.pen = this.onCanvas ? new CanvasPen(this.plot) : new SvgPen(this.plot);
    this.axisPen = new SvgPen(this.axis);
    if (this.onCanvas) this.scroll.addEventListener("scroll", () => this.draw());
    this.listen();
  }

  get height() {
    const rows = this.timeline.rows.length;
    return rows <= 40 ? 22 : rows <= 160 ? 16 : 11;
  }
  get curve() {
    return options.memory && this.hasMemory ? (this.timeline.rows.length <= 40 ? 16 : 8) : 0;
  }
  get pitch() {
    return this.height + this.curve + (this.timeline.rows.length <= 160 ? 6 : 3);
  }
  x(moment) {
    return ((moment - view.start) / (view.finish - view.start)) * this.width;
  }

  arrange() {
    this.labels.replaceChildren(...this.timeline.rows.map((row) => {
      const label = element("div", "", row.name);
      label.title = row.name;
      Object.assign(label.style, { height: `${this.pitch}px`, lineHeight: `${this.height}px`, fontSize: this.height < 14 ? "9px" : "" });
      return label;
    }));
    this.plot.style.height = `${this.pitch * this.timeline.rows.length}px`;
  }

  draw() {
    this.width = this.plot.clientWidth;
    const whole = this.pitch * this.timeline.rows.length;
    const height = this.onCanvas ? Math.min(whole, this.scroll.clientHeight - AXIS) : whole;
    const above = this.onCanvas ? this.scroll.scrollTop : 0;
    this.painted = 0;
    this.pen.begin(this.width, height);
    this.ticks(height);
    this.timeline.rows.forEach((row, number) => {
      const y = number * this.pitch - above;
      if (y + this.pitch > 0 && y < height) this.row(row, number, y);
    });
    if (options.messages) this.messages(above);
    this.pen.end();
    this.section.dataset.painted = this.painted;
  }

  ticks(height) {
    const span = view.finish - view.start;
    const rough = span / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((it) => it * power).find((it) => it >= rough);
    this.axisPen.begin(this.width, AXIS);
    for (let at = Math.ceil(view.start / step) * step; at <= view.finish + step * NEAREST; at += step) {
      const x = this.x(at);
      this.axisPen.text(Math.min(Math.max(x, 14), this.width - 22), 14, seconds(Math.abs(at) < step * NEAREST ? 0 : at, span), theme.soft);
      this.pen.line(x, 0, x, height, theme.grid);
    }
    this.axisPen.end();
    const end = this.x(this.timeline.seconds);
    if (end >= 0 && end <= this.width + 1) this.pen.line(Math.min(end, this.width - 0.5), 0, Math.min(end, this.width - 0.5), height, theme.soft, 0.7);
  }

  row(row, number, y) {
    const { height } = this, middle = y + height / 2;
    let finished = 0;
    for (const bar of row.bars) {
      const [start, finish] = [bar[START], bar[FINISH]];
      const [left, right] = [this.x(start), this.x(finish)];
      if (start > finished) this.wait(finished, start, bar, middle);
      finished = Math.max(finished, finish);
      if (right < 0 || left > this.width) continue;
      const [from, to] = [Math.max(left, -4), Math.min(right, this.width + 4)];
      const fill = fillOf(bar[KIND], color(bar[MODULE])), stages = this.stages[number][bar[MODULE]];
      const width = Math.max(to - from - (to - from > 3 ? 0.8 : 0), 0.6);
      this.pen.bar(from, y, width, height, fill, hatched(bar[KIND]));
      this.painted += 1;
      if (bar[STAGE] > stages[0] && width > 4 && height > 14) this.pen.rect(from + 1.5, y + height - 3, width - 3, 1.6, inkOn(fill), 0.65);
      this.caption(bar, from, Math.min(width, this.width - from), y, fill, stages.length > 1);
    }
    if (this.timeline.seconds > finished) this.wait(finished, this.timeline.seconds, null, middle);
    if (this.curve) this.drawMemory(row, y + height + 1);
  }

  caption(bar, x, width, y, fill, several) {
    if (this.height < 14 || !bar[MICROBATCHES].length) return;
    const short = numbers(bar[MICROBATCHES]), long = `${bar[STAGE]}·${short}`;
    const text = several && long.length * LETTER + 6 < width ? long : short;
    const visible = x < 0 ? width + x : width;
    if (text.length * LETTER + 3 > visible) return;
    const ink = hatched(bar[KIND]) ? "#ffffff" : inkOn(fill);
    if (hatched(bar[KIND])) this.pen.rect(Math.max(x, 0) + visible / 2 - text.length * 3.6, y + this.height / 2 - 6.5, text.length * 7.2, 13, fill, 0.95);
    this.pen.text(Math.max(x, 0) + visible / 2, y + this.height / 2 + 4, text, hatched(bar[KIND]) ? inkOn(fill) : ink);
  }

  wait(start, finish, bar, middle) {
    const [left, right] = [Math.max(this.x(start), 0), Math.min(this.x(finish), this.width)];
    if (right - left < 0.8) return;
    this.pen.rect(left, middle - 1.5, right - left - 0.8, 3, bar ? causeColor(bar[CAUSE]) : theme.idle, bar && modules.includes(bar[CAUSE]) ? 0.55 : 0.7);
  }

  drawMemory(row, y) {
    const scale = (this.curve - 5) / this.peak, below = y + this.curve - 3;
    row.memory.forEach(([moment, sizes], at) => {
      const until = at + 1 < row.memory.length ? row.memory[at + 1][0] : this.timeline.seconds;
      const [left, right] = [Math.max(this.x(moment), 0), Math.min(this.x(until), this.width)];
      if (right <= left) return;
      let base = below;
      sizes.forEach((size, module) => {
        if (!size) return;
        this.pen.rect(left, base - size * scale, right - left, size * scale, color(module), 0.55);
        base -= size * scale;
      });
    });
    this.pen.line(0, below + 0.5, this.width, below + 0.5, theme.grid);
  }

  messages(above) {
    const at = (number) => number * this.pitch - above + this.height / 2;
    for (const it of this.timeline.transfers) {
      const [left, right] = [this.x(it.start), this.x(it.finish)];
      if (right < 0 || left > this.width) continue;
      for (const source of it.sources) for (const target of it.targets)
        if (source !== target) this.pen.line(left, at(source), right, at(target), theme.ink, 0.45, 1.2);
    }
  }

  // What lies under the pointer: a bar, or the wait before one.
  under(event) {
    const box = this.plot.getBoundingClientRect();
    const row = this.timeline.rows[Math.floor((event.clientY - box.top) / this.pitch)];
    const moment = view.start + ((event.clientX - box.left) / this.width) * (view.finish - view.start);
    if (!row || moment < 0 || moment > this.timeline.seconds) return null;
    let [low, high] = [0, row.bars.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.bars[middle][FINISH] < moment) low = middle + 1;
      else high = middle;
    }
    const bar = row.bars[low], finished = low ? row.bars[low - 1][FINISH] : 0;
    if (bar && moment >= bar[START]) return { row, bar };
    return { row, gap: { start: finished, finish: bar ? bar[START] : this.timeline.seconds, cause: bar ? bar[CAUSE] || "unknown" : "drain" } };
  }

  listen() {
    const { plot } = this;
    plot.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      if (!sideways && event.deltaY > 0 && view.start === 0 && view.finish === whole) return; // nothing left to zoom out of
      event.preventDefault();
      if (sideways) return move(((event.deltaX || event.deltaY) / this.width) * (view.finish - view.start));
      const box = plot.getBoundingClientRect();
      zoom(Math.exp(event.deltaY * 0.0016), (event.clientX - box.left) / this.width);
    }, { passive: false });
    plot.addEventListener("pointerdown", (event) => {
      plot.setPointerCapture(event.pointerId);
      plot.classList.add("moving");
      this.last = event;
    });
    plot.addEventListener("pointermove", (event) => {
      if (plot.classList.contains("moving")) {
        move(((this.last.clientX - event.clientX) / this.width) * (view.finish - view.start));
        this.scroll.scrollTop += this.last.clientY - event.clientY;
        this.last = event;
      }
      showTip(this, event);
    });
    for (const name of ["pointerup", "pointercancel"]) plot.addEventListener(name, () => plot.classList.remove("moving"));
    plot.addEventListener("pointerleave", () => (find("tip").hidden = true));
    plot.addEventListener("dblclick", () => show(0, whole));
  }
}
