// One view on one place of the page: heading, legend, tools, chart or text, and its data table.
// Follows chart.js in one module. It asks its hub (board.js) to send, and never sends by itself.

const CALM = matchMedia("(prefers-reduced-motion: reduce)"); // then charts move at most once a second
const amount = (n) => n >= 1e6 ? `${(n / 1e6).toPrecision(3)} MB` : n >= 1e3 ? `${(n / 1e3).toPrecision(3)} kB` : `${n} bytes`;
const time = (s) => s >= 1 ? `${s.toPrecision(4)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toFixed(0)} µs`;

// A span's facts as lines of text.
function describe(box, names) {
  const name = names[box.code], seconds = box.x1 - box.x0;
  const lines = [name.name, `rank ${box.rank}, step ${box.step}`, `${time(seconds)} from ${box.x0.toFixed(4)} s`];
  if (box.nbytes > 0) lines.push(`${amount(box.nbytes)} sent`);
  if (box.mbit > 0) lines.push(`${Number(box.mbit.toPrecision(3))} Mbit/s`);
  if (box.x0 - box.asked > 1e-4) lines.push(`asked for ${time(box.x0 - box.asked)} before`);
  return lines;
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0] };
const KEYS_SAID = "Boxes: arrow keys go from one to the next and name it, Home and End to the ends of a row, Page Up and Page Down "
  + "to other steps; Enter pins it, Escape lets go.";
const same = (a, b) => !!a && !!b && a.row === b.row && a.lane[0] === b.lane[0];

// A box as a sentence, for screen readers.
function spoken(box, names, pinned) {
  const [name, place, ...rest] = describe(box, names);
  return `${place[0].toUpperCase()}${place.slice(1)}: ${[name, ...rest].join(", ")}${pinned ? ", pinned" : ""}.`;
}

class Panel {
  constructor(hub, holding) {
    this.hub = hub;
    this.holding = holding;
    const { spec } = holding;
    this.body = element("div", { className: spec.figure ? "wb-frame" : "wb-text" });
    this.vacant = element("p", { className: "wb-empty", textContent: spec.empty });
    this.head = element("div", { className: "wb-head" }, element("h3", { textContent: spec.title }));
    this.el = element("section", { className: "wb-panel", role: spec.figure ? "figure" : "region" },
      this.head, this.vacant, this.body);
    this.el.setAttribute("aria-label", `${spec.title}. ${spec.about}`);
    this.el.dataset.view = spec.name;
    if (spec.spoken) this.body.setAttribute("aria-live", "polite");
    this.el.style.setProperty("--wide", spec.width[0]);
    this.el.style.setProperty("--narrow", spec.width[1]);
    if (spec.figure) {
      this.picture = new Picture(holding, this.body);
      this.legend = element("ul", { className: "wb-legend" });
      this.body.before(this.legend);
    }
    if (spec.tools) this.steps();
    if (spec.table) this.table();
    this.visible = true;
  }
  get dirty() {
    return this.version !== this.holding.version || this.theme !== this.hub.theme || this.redraw;
  }
  // Curves need at most two redraws a second, charts out of sight fewer. The timeline takes all it can get.
  due(now) {
    if (!this.dirty || this.at === undefined || this.theme !== this.hub.theme || this.redraw) return this.dirty;
    return now - this.at > (!this.visible ? 2500 : CALM.matches ? 1000 : this.holding.spec.tools ? 0 : 450);
  }
  async draw(Plotly) {
    const { holding } = this;
    const [version, theme] = [holding.version, this.hub.theme];
    let labels = [];
    this.redraw = false; // a request during a drawing is drawn after it
    this.vacant.hidden = !holding.empty || !holding.spec.empty;
    this.el.hidden = holding.spec.quiet && holding.empty;
    this.body.hidden = !!this.picture && holding.empty;
    if (!this.picture) this.text(holding.html ?? "");
    else if (!holding.empty) {
      if (this.theme !== theme || !this.items) this.key(theme);
      for (const [item, number] of this.items) item.hidden = item.seldom && !holding.traces[number].n;
      this.picture.low = this.low;
      const { marks, until, lit } = this.hub;
      labels = await this.picture.draw(Plotly, theme, until ? marks.filter((m) => m.t <= until.t) : marks, lit);
      if (labels) this.el.dataset.marks = JSON.stringify(labels);
    }
    [this.version, this.theme, this.at] = [version, theme, performance.now()];
    if (!labels) return; // drawn once it has a width
    this.follow?.();
    if (this.pointer) this.point(this.pointer); // another span may be under it now
    else if (this.tip) this.name();
    this.facts();
  }
  // The legend. Kinds of boxes and rare traces are listed only while the chart has some.
  key(theme) {
    const { figure } = this.holding.spec;
    this.items = legend(figure, theme).map(([name, css, number]) => {
      const swatch = element("span", { className: "wb-swatch" }), { lane, rank, rare } = figure.data[number].meta ?? {};
      swatch.style.cssText = css;
      const item = rank === undefined ? element("li", {}, swatch, name) : element("li", {}, this.chooser(rank, swatch, name));
      return [Object.assign(item, { seldom: !!lane || !!rare }), number];
    });
    this.picture.chosen = (rank) => rank !== undefined && this.hub.choose(rank);
    this.legend.replaceChildren(...this.items.map(([item]) => item));
  }
  // A rank in the legend. Pointing at it highlights its curves; pressing it keeps them highlighted.
  chooser(rank, ...shown) {
    const button = element("button", { type: "button", className: "wb-rank", title: "highlight this rank; press to keep it highlighted" }, ...shown);
    button.dataset.rank = rank;
    button.setAttribute("aria-pressed", String(this.hub.looks.rank === rank));
    button.onclick = () => this.hub.choose(rank);
    for (const begin of ["mouseenter", "focus"]) button.addEventListener(begin, () => this.hub.light(rank));
    for (const end of ["mouseleave", "blur"]) button.addEventListener(end, () => this.hub.light(null));
    return button;
  }
  // Applies `looks` to the page: open tables, the highlighted rank.
  look() {
    this.opens?.();
    for (const button of this.legend?.querySelectorAll(".wb-rank") ?? [])
      button.setAttribute("aria-pressed", String(this.hub.looks.rank === Number(button.dataset.rank)));
    if (this.holding.spec.figure?.data.some((trace) => trace.meta?.rank !== undefined) && this.picture.lit !== this.hub.lit) this.redraw = true;
    if (this.tip && !this.pointer) this.name();
  }
  text(html) {
    const open = new Set([...this.body.querySelectorAll("details[open]")].map((d) => d.dataset.key));
    const focused = this.body.contains(document.activeElement) && document.activeElement.dataset.ask;
    this.body.innerHTML = html;
    for (const d of this.body.querySelectorAll("details")) if (open.has(d.dataset.key)) d.open = true;
    for (const button of this.body.querySelectorAll("[data-ask]")) {
      button.onclick = () => this.hub.say({ kind: "ask", view: this.holding.spec.name, request: JSON.parse(button.dataset.ask) });
      if (focused && button.dataset.ask === focused) button.focus();
    }
  }
  // What was really drawn, for tests.
  facts() {
    const { holding, el } = this;
    el.dataset.draws = Number(el.dataset.draws ?? 0) + 1;
    el.dataset.points = JSON.stringify(holding.traces.map((t) => t.total));
    const rows = holding.note();
    if (rows) el.dataset.spans = rows;
    if (holding.facts.last !== undefined) el.dataset.newestStep = holding.facts.last;
    if (holding.facts.first !== undefined) el.dataset.firstStep = holding.facts.first;
    if (holding.facts.newest !== undefined)
      el.dispatchEvent(new CustomEvent("board-drawn", { bubbles: true,
        detail: { view: holding.spec.name, newest: holding.facts.newest + this.hub.epoch, rows, now: Date.now() / 1000 } }));
  }
  table() {
    const place = element("div", { className: "wb-table", hidden: true, tabIndex: 0 });
    const button = element("button", { type: "button", className: "wb-button", textContent: "Table" });
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", `Data table of ${this.holding.spec.title}`);
    const { name } = this.holding.spec;
    this.opens = () => {
      const open = (this.hub.looks.tables ?? []).includes(name);
      if (open !== place.hidden) return;
      place.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
      this.hub.say({ kind: "table", view: name, open });
    };
    button.onclick = () => {
      const open = this.hub.looks.tables ?? [];
      this.hub.look({ tables: place.hidden ? [...open, name] : open.filter((other) => other !== name) });
    };
    this.tabulate = ({ head, rows, note }) => {
      const cell = (tag) => (value) => element(tag, { textContent: value ?? "" });
      place.replaceChildren(element("table", {}, element("caption", { textContent: note || this.holding.spec.title }),
        element("thead", {}, element("tr", {}, ...head.map(cell("th")))),
        element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td")))))));
    };
    this.head.append(button);
    this.el.append(place);
  }
  // Follows the run or holds a step still. Hovering names the span under the pointer.
  steps() {
    const { spec } = this.holding;
    const ask = (request) => this.hub.say({ kind: "ask", view: this.holding.spec.name, request });
    const button = element("button", { type: "button", className: "wb-button wb-follow", textContent: "Hold" });
    const slider = element("input", { type: "range", min: 0, max: 0, step: 1, className: "wb-slider" });
    const box = element("input", { type: "number", min: 0, step: 1, className: "wb-step" });
    const width = element("select", { className: "wb-steps" },
      ...["auto", 1, 2, 4, 8, 16, 32].map((n) => element("option", { value: n, textContent: n === "auto" ? n : `${n} step${n > 1 ? "s" : ""}` })));
    slider.setAttribute("aria-label", "Step shown");
    const holds = () => this.holding.facts.follow === false;
    const go = (value) => {
      const at = Math.max(0, Math.min(Number(value) || 0, Number(slider.max)));
      slider.value = box.value = at;
      ask({ at });
    };
    button.onclick = () => ask({ at: holds() ? null : this.holding.facts.first ?? 0 });
    slider.oninput = () => {
      clearTimeout(this.wait);
      box.value = slider.value;
      this.wait = setTimeout(() => go(slider.value), 60);
    };
    box.onchange = () => go(box.value);
    width.onchange = () => ask({ steps: Number(width.value) || null });
    this.follow = () => {
      const { first, latest, live } = this.holding.facts;
      button.hidden = live === false;
      button.textContent = holds() ? "Follow" : "Hold still";
      button.setAttribute("aria-pressed", String(holds()));
      slider.max = box.max = latest ?? 0;
      if (!this.el.contains(document.activeElement) || document.activeElement === button || !holds())
        if (document.activeElement !== box) slider.value = box.value = first ?? 0;
    };
    const label = (text, input) => element("label", { className: "wb-label" }, text, input);
    const most = spec.tools === "steps" ? [label("show ", width)] : []; // a report has chosen its steps
    this.head.append(element("span", { className: "wb-tools" }, button, slider, label("step ", box), ...most));
    this.hover();
  }
  hover() {
    const tip = this.tip = element("div", { className: "wb-tip", hidden: true });
    this.el.append(tip);
    this.point = (event) => {
      this.pointer = event;
      const hit = event && this.picture.boxAt(event);
      if (!hit) return this.name();
      tip.hidden = false;
      tip.replaceChildren(...describe(hit, this.holding.facts.names).map((line) => element("div", { textContent: line })));
      const frame = this.el.getBoundingClientRect();
      tip.style.top = `${event.clientY - frame.top + 14}px`;
      tip.style.left = `${Math.min(event.clientX - frame.left + 14, frame.width - tip.offsetWidth - 4)}px`;
    };
    this.body.addEventListener("mousemove", this.point);
    this.body.addEventListener("mouseleave", () => this.point(null));
    this.walk(tip);
  }
  // Arrow keys go from box to box, along a row and from row to row. The chart then holds still.
  // Enter pins the box, so that its name stays. Escape releases it, then leaves the boxes. Page keys change the step.
  walk(tip) {
    const { body, picture, holding } = this;
    const ask = (at) => this.hub.say({ kind: "ask", view: holding.spec.name, request: { at } });
    this.said = element("p", { className: "wb-said twb-sr", role: "status" });
    body.after(this.said);
    Object.assign(body, { tabIndex: 0 });
    Object.assign(body.dataset, { lmSuppressShortcuts: "true" }); // see [Note: Keys] in controls.js
    body.setAttribute("role", "application");
    body.setAttribute("aria-label", KEYS_SAID);
    tip.setAttribute("aria-hidden", "true"); // a sentence says the same
    const stop = () => { this.box = null; this.name(); };
    body.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const [along, across] = ARROWS[event.key] ?? [];
      const page = { PageUp: -1, PageDown: 1 }[event.key];
      if (event.key === "Escape") return this.leave(stop);
      if (event.key !== "Enter" && along === undefined && !page) return;
      event.preventDefault();
      if (event.key === "Enter") return this.box && this.pin(same(this.box, this.pinned) ? null : this.box);
      if (page) return ask(Math.max(0, (holding.facts.first ?? 0) + page));
      if (holding.facts.follow) ask(holding.facts.first);
      this.box = this.beside(picture.rows(), along, across);
      this.name();
    });
    body.addEventListener("blur", stop);
    let pinned = 0;
    body.addEventListener("click", (event) => { // plotly adds two clicks to a tap: a spurious one, and one that would undo it
      const hit = picture.boxAt(event);
      if ((!event.isTrusted && !event.clientX && !event.clientY) || (hit && event.timeStamp - pinned < 100)) return;
      pinned = hit ? event.timeStamp : 0;
      if (hit || this.pinned) this.pin(hit && !same(hit, this.pinned) ? hit : null);
    });
  }
  // Escape: first the pin, then the box, then the chart, whose tools come next.
  leave(stop) {
    if (this.pinned) return this.pin(null);
    if (this.box) return stop();
    this.head.querySelector(".wb-tools :is(button, input):not([hidden])")?.focus();
  }
  // Pins a box, or none, for all places of the page and for `state()`. The chart then holds still.
  pin(box) {
    const { facts, spec } = this.holding;
    if (box && facts.follow) this.hub.say({ kind: "ask", view: spec.name, request: { at: facts.first } });
    const plain = box && { view: spec.name, row: box.row, lane: box.lane[0], rank: box.rank, step: box.step,
      name: this.holding.facts.names[box.code].name };
    this.hub.look({ pin: plain || null });
  }
  // The pinned box, if it is on the chart.
  get pinned() {
    const { pin } = this.hub.looks;
    if (pin?.view !== this.holding.spec.name || !this.picture.div._fullLayout) return null;
    return this.picture.rows().flat().find((box) => box.row === pin.row && box.lane[0] === pin.lane) ?? null;
  }
  // Names the selected box, else the pinned one, next to it and as a sentence, and frames it.
  name() {
    const { picture, body, tip } = this, pinned = this.pinned, box = this.box ?? pinned;
    if (picture.ringed !== box) {
      picture.ringed = box;
      if (picture.div._fullLayout) picture.over(picture.shown);
    }
    tip.hidden = !box;
    const held = box && same(box, pinned);
    const sentence = box ? spoken(box, this.holding.facts.names, held) : "";
    if (this.said.textContent !== sentence) this.said.textContent = sentence;
    if (!box) return;
    const { xaxis, yaxis } = picture.div._fullLayout, middle = (Math.max(box.x0, xaxis.range[0]) + Math.min(box.x1, xaxis.range[1])) / 2;
    const lines = [...describe(box, this.holding.facts.names), ...(held ? ["pinned"] : [])];
    tip.replaceChildren(...lines.map((line) => element("div", { textContent: line })));
    tip.style.top = `${body.offsetTop + yaxis._offset + yaxis.l2p(box.at) + 14}px`;
    tip.style.left = `${Math.max(0, Math.min(xaxis._offset + xaxis.l2p(middle), this.el.clientWidth - tip.offsetWidth - 4))}px`;
  }
  // The box `along` its row and `across` rows from the present one, or the first box without a present one.
  // Null if no box is in sight.
  beside(rows, along, across) {
    if (!this.box || !rows.length) return rows[0]?.[0] ?? null;
    const at = Math.max(0, rows.findIndex((row) => row[0].y === this.box.y)), x = this.box.x0;
    if (across) {
      const row = rows[at + across] ?? rows[at];
      return row.reduce((a, b) => (Math.abs(b.x0 - x) < Math.abs(a.x0 - x) ? b : a));
    }
    const place = rows[at].findIndex((box) => box.x0 === x && box.x1 === this.box.x1);
    return rows[at][Math.max(0, Math.min(place + along, rows[at].length - 1))];
  }
}
