// One chart of a board: the rows it holds, and how plotly draws them in the page's colours.
// Knows no widget and no order of messages. A chart's spec says what it means (see widgets/views/_base.py).

const HOLD = 1000; // points of a trace before its past is thinned; plotly keeps an object for each point
const KEEP = 500;
const NUMBERS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };
const STANDINS = { "#010101": "ink", "#5f5f61": "muted", "#9b9b9d": "faint", "#d9d9db": "grid", "#fefefe": "paper" };

function element(tag, attributes = {}, ...children) {
  const el = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) k in el && k !== "list" ? (el[k] = v) : el.setAttribute(k, v);
  el.append(...children);
  return el;
}

// A column of a message: [where, how many, type, base] into the buffer, or plain text values.
function unpack(column, buffer) {
  if (!(column.length === 4 && typeof column[2] === "string" && NUMBERS[column[2]])) return column;
  const [where, count, type, base] = column;
  const raw = new NUMBERS[type](buffer, where, count);
  const out = new Float64Array(count);
  for (let i = 0; i < count; i++) out[i] = raw[i] + base;
  return out;
}

// The data of a trace: growing columns of equal length.
class Columns {
  constructor() {
    this.n = 0;
    this.total = 0; // rows ever received
    this.store = {};
  }
  replace(columns) {
    this.store = columns;
    this.n = Object.values(columns)[0]?.length ?? 0;
    this.total = this.n;
  }
  append(columns, said) {
    const extra = Object.values(columns)[0].length;
    for (const [name, values] of Object.entries(columns)) {
      let have = this.store[name];
      if (!have || have.length < this.n + extra) {
        const grown = new Float64Array(Math.max(256, 2 * (this.n + extra)));
        if (have) grown.set(have.subarray(0, this.n));
        have = this.store[name] = grown;
      }
      have.set(values, this.n);
    }
    this.n += extra;
    this.total += said ?? extra;
    if (this.n > HOLD) this.thin();
  }
  // Keeps the least and the greatest y of each stretch of x, so that the shape stays.
  thin() {
    const { x, y } = this.store;
    const bins = KEEP / 2 - 1;
    const scale = bins / Math.max(x[this.n - 1] - x[0], 1e-12);
    const keep = [];
    for (let i = 0; i < this.n; ) {
      const bin = Math.floor((x[i] - x[0]) * scale);
      let low = i, high = i;
      for (; i < this.n && Math.floor((x[i] - x[0]) * scale) === bin; i++) {
        if (y[i] < y[low]) low = i;
        if (y[i] > y[high]) high = i;
      }
      keep.push(Math.min(low, high));
      if (low !== high) keep.push(Math.max(low, high));
    }
    for (const column of Object.values(this.store)) keep.forEach((from, to) => (column[to] = column[from]));
    this.n = keep.length;
  }
  column(name) {
    const values = this.store[name];
    return values?.subarray ? values.subarray(0, this.n) : values;
  }
}

// Closed outlines of boxes as one line with gaps. A box is in its rank's row, between the lane's edges.
function outlines({ store: { x0, x1, rank } }, [top, bottom]) {
  const x = new Float64Array(6 * x0.length), y = new Float64Array(6 * x0.length);
  for (let i = 0, j = 0; i < x0.length; i++, j += 6) {
    x[j] = x[j + 3] = x[j + 4] = x0[i];
    x[j + 1] = x[j + 2] = x1[i];
    y[j] = y[j + 1] = y[j + 4] = rank[i] + top;
    y[j + 2] = y[j + 3] = rank[i] + bottom;
    x[j + 5] = y[j + 5] = NaN;
  }
  return { x, y };
}

// The rows of one view, shared by all places of the page that show it.
class Holding {
  constructor(spec) {
    this.spec = spec;
    this.traces = (spec.figure?.data ?? []).map(() => new Columns());
    this.layout = {};
    this.facts = {};
    this.html = null;
    this.table = null;
    this.version = 0;
    this.seen = new Uint8Array(1 << 12); // one bit per row of the record that was ever drawn
  }
  apply(patch, buffer) {
    for (const [mode, all] of [["append", patch.append], ["replace", patch.replace]])
      for (const [number, columns] of Object.entries(all ?? {})) {
        const plain = Object.fromEntries(Object.entries(columns).map(([k, v]) => [k, unpack(v, buffer)]));
        this.traces[number][mode](plain, patch.facts?.counts?.[number]);
      }
    Object.assign(this.layout, patch.layout ?? {});
    Object.assign(this.facts, patch.facts ?? {});
    if (patch.html !== undefined) this.html = patch.html;
    this.version++;
  }
  get empty() {
    return this.spec.figure ? this.traces.every((t) => t.n === 0) : !this.html;
  }
  // Notes the rows of the record that the page shows now. Returns how many it ever showed.
  note() {
    for (const trace of this.traces)
      for (const row of trace.column("row") ?? []) {
        const byte = row >> 3, bit = 1 << (row & 7);
        if (byte >= this.seen.length) {
          const grown = new Uint8Array(2 * byte + 8);
          grown.set(this.seen);
          this.seen = grown;
        }
        if (!(this.seen[byte] & bit)) {
          this.seen[byte] |= bit;
          this.rows = (this.rows ?? 0) + 1;
        }
      }
    return this.rows ?? 0;
  }
}

function themed(value, colours) {
  if (typeof value === "string") return STANDINS[value] ? colours[STANDINS[value]] : value;
  if (Array.isArray(value)) return value.map((v) => themed(v, colours));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, colours)]));
  return value;
}

function put(layout, path, value) {
  const parts = path.split(".");
  let at = layout;
  for (const part of parts.slice(0, -1)) at = at[part] = { ...(at[part] ?? {}) };
  at[parts.at(-1)] = value;
}

const HATCHES = {
  "": (c) => c,
  "/": (c) => `repeating-linear-gradient(135deg, ${c} 0 2px, transparent 2px 5px)`,
  "\\": (c) => `repeating-linear-gradient(45deg, ${c} 0 2px, transparent 2px 5px)`,
  "|": (c) => `repeating-linear-gradient(90deg, ${c} 0 2px, transparent 2px 5px)`,
  "-": (c) => `repeating-linear-gradient(0deg, ${c} 0 2px, transparent 2px 5px)`,
  ".": (c) => `radial-gradient(${c} 1.5px, transparent 1.6px) 0 0 / 5px 5px`,
  x: (c) => `repeating-linear-gradient(45deg, ${c} 0 1.5px, transparent 1.5px 5px), `
    + `repeating-linear-gradient(135deg, ${c} 0 1.5px, transparent 1.5px 5px)`,
};

// The legend's entries: [name, css of a swatch, trace] of every trace with an entry.
const CORNERS = { "triangle-up": "50% 0,100% 100%,0 100%", "triangle-down": "0 0,100% 0,50% 100%", diamond: "50% 0,100% 50%,50% 100%,0 50%" };
function legend(figure, colours) {
  return figure.data.flatMap((trace, number) => {
    if (trace.showlegend === false || !trace.name) return [];
    const colour = themed(trace.fillcolor ?? trace.marker?.color ?? trace.line?.color, colours);
    if (trace.marker?.symbol?.startsWith("line-ns")) // a stroke across a bar
      return [[trace.name, `width:3px;height:16px;background:${colour}`, number]];
    const points = CORNERS[trace.marker?.symbol?.replace("-open", "")];
    if (points) return [[trace.name, `width:13px;height:12px;background:${colour};clip-path:polygon(${points})`, number]];
    if (!trace.fill && trace.type !== "bar") {
      const width = trace.line?.width ?? 2;
      const dash = { dash: "dashed", dot: "dotted" }[trace.line?.dash] ?? "solid";
      return [[trace.name, `height:0;border-top:${width}px ${dash} ${colour};opacity:${trace.opacity ?? 1}`, number]];
    }
    const shape = (trace.fillpattern ?? trace.marker?.pattern)?.shape || "";
    const [top, bottom] = trace.meta?.lane ?? [0, 0.4];
    const height = Math.max(4, Math.min(14, (bottom - top) * 36));
    const css = `height:${height}px;background:${HATCHES[shape](colour)}`;
    return [[trace.name, shape ? `${css};outline:1px solid ${colour}` : css, number]];
  });
}

// One drawing of a holding: plotly draws axes and traces, an overlay draws names in boxes and the marks of changes.
// (Text in plotly's SVG took 80 % of a redraw. A canvas and a few elements cost almost nothing.)
class Picture {
  constructor(holding, frame) {
    this.holding = holding;
    this.div = element("div", { className: "wb-chart" });
    this.names = element("canvas", { className: "wb-over" });
    this.marks = element("div", { className: "wb-over" });
    for (const over of [this.names, this.marks]) over.setAttribute("aria-hidden", "true");
    frame.append(this.div, this.names, this.marks);
    this.pen = this.names.getContext("2d");
    this.colours = null;
    this.width = 0; // at the last drawing
  }
  // Returns the labels of the changes on the chart, or null if the page gives the chart no width.
  // lit: the rank with highlighted curves, or null.
  async draw(Plotly, colours, marks, lit = null) {
    const { spec, traces, version } = this.holding;
    this.lit = lit;
    if (colours !== this.colours) {
      this.colours = colours;
      this.data = themed(spec.figure.data, colours);
      this.base = themed(spec.figure.layout, colours);
    }
    this.width = this.div.clientWidth;
    if (!this.width) return null;
    this.family = getComputedStyle(this.div).fontFamily;
    const layout = { ...this.base, font: { ...this.base.font, family: this.family } };
    Object.assign(layout, { width: this.width, datarevision: version });
    for (const [path, value] of Object.entries(this.holding.layout)) put(layout, path, value);
    this.fit(layout);
    this.hold(layout);
    const data = this.data.map((trace, i) => this.filled(trace, traces[i]));
    const known = this.div._fullLayout;
    // Without zoom, a tap must not reset the range; plotly takes a tap as two clicks.
    const doubleClick = layout.dragmode === false ? false : "reset";
    await Plotly.react(this.div, data, layout, { displayModeBar: false, doubleClick, responsive: false });
    if (!known) this.div.on("plotly_relayout", () => this.over(this.shown));
    if (!known) this.div.on("plotly_click", ({ points }) => this.chosen?.(this.data[points[0].curveNumber].meta?.rank));
    return this.over(marks);
  }
  // Removes axes without data and gives their room to the other axes. A chart in a narrow place is less high.
  fit(layout) {
    const axis = (trace) => trace.xaxis ?? "x";
    const every = [...new Set(this.data.map(axis))], domain = (x) => layout[x.replace("x", "xaxis")]?.domain ?? [0, 1];
    const used = every.filter((x) => this.data.some((trace, i) => axis(trace) === x && this.holding.traces[i].n));
    const { t, b } = layout.margin;
    if (this.low) layout.height = Math.round(this.low * (layout.height - t - b)) + t + b;
    if (this.low) this.close(layout, domain);
    if (!used.length || used.length === every.length) return;
    const gap = domain(every[1])[0] - domain(every[0])[1], width = (1 - gap * (used.length - 1)) / used.length;
    for (const x of every) {
      const at = used.indexOf(x), [horizontal, vertical] = [x.replace("x", "xaxis"), x.replace("x", "yaxis")];
      for (const name of [horizontal, vertical]) layout[name] = { ...layout[name], visible: at >= 0 };
      if (at >= 0) layout[horizontal].domain = [at * (width + gap), at * (width + gap) + width];
    }
  }
  // In a narrow place an axis has fewer numbers, so that they stay horizontal, and its title is split into lines.
  close(layout, domain) {
    const { l, r, b } = layout.margin;
    this.part(layout, domain);
    let most = 1;
    for (const name of Object.keys(layout).filter((key) => key.startsWith("xaxis"))) {
      const [from, to] = domain(name.replace("xaxis", "x")), room = (this.width - l - r) * (to - from);
      const lines = [""], axis = layout[name];
      for (const word of (axis.title?.text ?? "").split(" ")) {
        if (lines.at(-1) && 7.5 * (lines.at(-1).length + word.length) > room) lines.push("");
        lines.push(`${lines.pop()} ${word}`.trim());
      }
      most = Math.max(most, lines.length);
      const nticks = Math.min(axis.nticks || Math.max(2, Math.floor(room / 60)), Math.max(2, Math.floor(room / 35)));
      layout[name] = { ...axis, nticks, tickangle: 0, ...(axis.title && { title: { ...axis.title, text: lines.join("<br>") } }) };
    }
    layout.margin = { ...layout.margin, b: b + 18 * (most - 1) };
    layout.height += 18 * (most - 1);
  }
  // Between two axes there is room for the numbers and the title of the second one, also in a narrow place.
  part(layout, domain) {
    const every = [...new Set(this.data.map((trace) => trace.xaxis ?? "x"))];
    const ends = every.map(domain), least = 62 / (this.width - layout.margin.l - layout.margin.r);
    const gaps = ends.slice(1).map(([from], i) =>
      Math.max(from - ends[i][1], layout[every[i + 1].replace("x", "yaxis")]?.title?.text ? least : 0));
    const sum = (all) => all.reduce((a, b) => a + b, 0), widths = ends.map(([from, to]) => to - from);
    let at = ends[0][0];
    const scale = (ends.at(-1)[1] - at - sum(gaps)) / sum(widths);
    if (!gaps.length || scale < 0.3) return;
    every.forEach((x, i) => {
      const name = x.replace("x", "xaxis"), to = at + scale * widths[i];
      layout[name] = { ...layout[name], domain: [at, to] };
      at = to + (gaps[i] ?? 0);
    });
  }
  filled(trace, columns) {
    if (trace.meta?.lane && columns.store.x0) return { ...trace, ...outlines(columns, trace.meta.lane) };
    const out = { ...trace };
    const { rank } = trace.meta ?? {};
    if (this.lit !== null && rank !== undefined)
      Object.assign(out, rank === this.lit ? { opacity: 1, line: { ...trace.line, width: 2.5 } } : { opacity: 0.15 });
    for (const name of ["x", "y", "z"]) if (columns.store[name]) out[name] = columns.column(name);
    return this.holding.until && !columns.store.z && out.x ? this.upTo(out) : out;
  }
  // While a run is played: the data up to this moment.
  upTo(trace) {
    const limit = this.holding.until[this.holding.spec.axes[trace.xaxis ?? "x"]];
    if (limit === undefined) return trace;
    const kept = [...trace.x.keys()].filter((i) => trace.x[i] <= limit);
    return { ...trace, x: kept.map((i) => trace.x[i]), y: kept.map((i) => trace.y[i]) };
  }
  // Axes span the whole run, so that curves grow along them.
  hold(layout) {
    for (const [axis, column] of Object.entries(this.holding.spec.axes)) {
      if (this.holding.spec.tools || this.holding.until?.[column] === undefined) continue;
      const every = this.holding.traces.filter((_, i) => (this.data[i].xaxis ?? "x") === axis && !this.holding.traces[i].store.z)
        .flatMap((t) => (t.n ? [...(t.column("x") ?? [])] : []));
      if (every.length) put(layout, `${axis.replace("x", "xaxis")}.range`, [Math.min(...every, 0), Math.max(...every)]);
    }
  }
  // The overlay over plotly's drawing. Returns the labels of the changes on the chart.
  over(marks) {
    this.shown = marks;
    const { width, height } = this.div._fullLayout;
    const scale = window.devicePixelRatio || 1;
    Object.assign(this.names, { width: width * scale, height: height * scale });
    this.names.style.cssText = `width:${width}px;height:${height}px`;
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.pen.font = `14px ${this.family}`;
    this.write();
    this.ring();
    return this.mark(marks);
  }
  // A frame around the selected or pinned box.
  ring() {
    const { xaxis, yaxis } = this.div._fullLayout, box = this.ringed;
    if (!box || !xaxis) return;
    const [low, high] = xaxis.range, from = Math.max(box.x0, low), to = Math.min(box.x1, high);
    if (from > to) return;
    const [top, bottom] = box.lane.map((edge) => yaxis._offset + yaxis.l2p(box.rank + edge));
    const left = xaxis._offset + xaxis.l2p(from), width = Math.max(xaxis.l2p(to) - xaxis.l2p(from), 2);
    for (const [wide, colour] of [[5, this.colours.paper], [2.5, this.colours.ink]]) {
      Object.assign(this.pen, { lineWidth: wide, strokeStyle: colour });
      this.pen.strokeRect(left, Math.min(top, bottom), width, Math.abs(bottom - top));
    }
  }
  // Writes the names of boxes into those that are wide enough, shortened to fit.
  write() {
    const { names } = this.holding.facts;
    this.names.written = []; // [word, from, to, y] of each name, for tests
    if (!names) return;
    const { xaxis, yaxis } = this.div._fullLayout;
    const [low, high] = xaxis.range;
    const measured = new Map(), rows = new Map();
    const wide = (word) => measured.get(word) ?? measured.set(word, this.pen.measureText(word).width).get(word);
    Object.assign(this.pen, { textAlign: "center", textBaseline: "middle" });
    this.data.forEach((trace, number) => {
      const { lane, text } = trace.meta ?? {};
      const { n, store: { x0, x1, rank, code } } = this.holding.traces[number];
      if (!lane || !x0 || Math.abs(yaxis.l2p(lane[1]) - yaxis.l2p(lane[0])) < 14) return;
      for (let i = 0; i < n; i++) {
        const y = yaxis._offset + yaxis.l2p(rank[i] + (lane[0] + lane[1]) / 2);
        const box = { left: xaxis.l2p(Math.max(x0[i], low)), right: xaxis.l2p(Math.min(x1[i], high)), y, text };
        rows.set(Math.round(y / 14), [...(rows.get(Math.round(y / 14)) ?? []), { ...box, short: names[code[i]].short }]);
      }
    });
    for (const boxes of rows.values()) this.writeRow(boxes, xaxis._offset, wide);
  }
  // Transfers may overlap. A name goes where no other box of its row is, so that names never touch.
  writeRow(boxes, offset, wide) {
    boxes.sort((a, b) => a.left - b.left);
    let free = -Infinity;
    boxes.forEach(({ left, right, y, text, short }, i) => {
      const from = Math.max(left, free), to = Math.min(right, boxes[i + 1]?.left ?? Infinity);
      free = Math.max(free, right);
      const word = text && short.find((w) => wide(w) + 5 <= to - from);
      if (!word) return;
      this.pen.fillStyle = text;
      this.pen.fillText(word, offset + (from + to) / 2, y + 1);
      this.names.written.push([word, from, to, y]);
    });
  }
  // A vertical line with a label at each change. Three rows alternate, so a label may extend to the third change after it.
  mark(marks) {
    const { axes, labelled, figure } = this.holding.spec;
    const shown = new Set(), out = [];
    for (const [axis, column] of Object.entries(axes)) {
      const x = this.div._fullLayout[axis.replace("x", "xaxis")], y = this.div._fullLayout.yaxis;
      const ends = [-1e9, -1e9, -1e9];
      const here = marks.filter((m) => m[column] >= Math.min(...x.range) && m[column] <= Math.max(...x.range));
      for (const [i, mark] of here.entries()) {
        const px = x.l2p(mark[column]), next = i + 3 < here.length ? x.l2p(here[i + 3][column]) : Infinity;
        const room = Math.min(next, x._length) - px - 8;
        let text = labelled ? `${mark.number} ${mark.label}` : String(mark.number);
        if (text.length > 34) text = text.slice(0, 33) + "…";
        const whole = this.pen.measureText(text).width;
        let row = ends.findIndex((end) => px > end), left = false;
        if (whole > room) {
          const back = next > x._length ? ends.findIndex((end) => px - whole - 8 > Math.max(end, 0)) : -1;
          if (back >= 0) [row, left] = [back, true];
          else text = this.cut(text, String(mark.number), room);
        }
        if (row < 0) [row, left, text] = [2, false, String(mark.number)];
        ends[row] = left ? px : px + this.pen.measureText(text).width + 8;
        const line = element("div", { className: "wb-mark" }, element("span", { textContent: text }));
        line.style.cssText = `left:${x._offset + px}px;top:${y._offset}px;height:${y._length}px`;
        const up = figure.layout.margin.t > 20 ? -20 : 20 * row; // above the drawing, if there is room
        line.firstChild.style.cssText = `top:${up}px;${left ? "right" : "left"}:3px;background:${this.colours.paper}`;
        out.push(line);
        shown.add(mark.label);
      }
    }
    this.marks.replaceChildren(...out);
    return [...shown];
  }
  // `text`, shortened at its end to fit; `least` if hardly anything would remain.
  cut(text, least, room) {
    let kept = text.replace(/…$/, "");
    while (kept.length > least.length + 3 && this.pen.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
    return kept.length > least.length + 3 ? `${kept}…` : least;
  }
  // All boxes on the chart, rows from top to bottom, each in order of time. A box is its columns' values.
  rows() {
    const found = new Map();
    const [low, high] = this.div._fullLayout?.xaxis?.range ?? [0, 0];
    this.holding.traces.forEach(({ store, n }, number) => {
      const lane = this.holding.spec.figure.data[number].meta?.lane;
      for (let i = 0; lane && store.x0 && i < n; i++) {
        if (store.x1[i] < low || store.x0[i] > high) continue;
        const y = store.rank[i] + (lane[0] + lane[1] < 0 ? 0 : 0.5); // compute above, network below
        const box = Object.fromEntries(Object.entries(store).map(([k, v]) => [k, v[i]]));
        found.set(y, [...(found.get(y) ?? []), { ...box, y, lane, at: store.rank[i] + (lane[0] + lane[1]) / 2 }]);
      }
    });
    return [...found].sort(([a], [b]) => a - b).map(([, row]) => row.sort((a, b) => a.x0 - b.x0));
  }
  // The box under the pointer, topmost first: its columns' values, or null.
  boxAt(event) {
    const full = this.div._fullLayout;
    if (!full?.xaxis) return null;
    const box = this.div.getBoundingClientRect();
    const x = full.xaxis.p2d(event.clientX - box.left - full.xaxis._offset);
    const y = full.yaxis.p2d(event.clientY - box.top - full.yaxis._offset);
    for (let number = this.holding.traces.length - 1; number >= 0; number--) {
      const { store, n } = this.holding.traces[number];
      const lane = this.holding.spec.figure.data[number].meta?.lane;
      if (!lane || !store.x0) continue;
      for (let i = 0; i < n; i++)
        if (x >= store.x0[i] && x <= store.x1[i] && y >= store.rank[i] + lane[0] && y <= store.rank[i] + lane[1])
          return { ...Object.fromEntries(Object.entries(store).map(([k, v]) => [k, v[i]])), lane };
    }
    return null;
  }
}
