// One view on one place of the page: heading, legend, tools, chart or text, and its data table.
// Follows chart.js in one module; asks its hub (board.js) to say things, never sends by itself.

const CALM = matchMedia("(prefers-reduced-motion: reduce)"); // then charts move once a second at most
const amount = (n) => n >= 1e6 ? `${(n / 1e6).toPrecision(3)} MB` : n >= 1e3 ? `${(n / 1e3).toPrecision(3)} kB` : `${n} bytes`;
const time = (s) => s >= 1 ? `${s.toPrecision(4)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toFixed(0)} µs`;

// What is known of a span, as lines of text.
function describe(box, names) {
  const name = names[box.code], seconds = box.x1 - box.x0;
  const lines = [name.name, `rank ${box.rank}, step ${box.step}`, `${time(seconds)} from ${box.x0.toFixed(4)} s`];
  if (box.nbytes > 0) lines.push(`${amount(box.nbytes)} sent`);
  if (box.mbit > 0) lines.push(`${Number(box.mbit.toPrecision(3))} Mbit/s`);
  if (box.x0 - box.asked > 1e-4) lines.push(`asked for ${time(box.x0 - box.asked)} before`);
  return lines;
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
  // Curves need no more than two redraws a second, charts out of sight fewer; the timeline takes all it can get.
  due(now) {
    if (!this.dirty || this.at === undefined || this.theme !== this.hub.theme || this.redraw) return this.dirty;
    return now - this.at > (!this.visible ? 2500 : CALM.matches ? 1000 : this.holding.spec.tools ? 0 : 450);
  }
  async draw(Plotly) {
    const { holding } = this;
    const [version, theme] = [holding.version, this.hub.theme];
    let labels = [];
    this.redraw = false; // what is asked for while this is drawn is drawn after it
    this.vacant.hidden = !holding.empty || !holding.spec.empty;
    this.el.hidden = holding.spec.quiet && holding.empty;
    this.body.hidden = !!this.picture && holding.empty;
    if (!this.picture) this.text(holding.html ?? "");
    else if (!holding.empty) {
      if (this.theme !== theme || !this.items) this.key(theme);
      for (const [item, number] of this.items) item.hidden = item.lane && !holding.traces[number].n;
      this.picture.low = this.low;
      labels = await this.picture.draw(Plotly, theme, this.hub.marks);
      if (labels) this.el.dataset.marks = JSON.stringify(labels);
    }
    [this.version, this.theme, this.at] = [version, theme, performance.now()];
    if (!labels) return; // drawn once it is given a width
    this.follow?.();
    if (this.pointer) this.point(this.pointer); // another span may lie under it now
    this.facts();
  }
  // The legend; kinds of boxes are listed while there are any.
  key(theme) {
    const { figure } = this.holding.spec;
    this.items = legend(figure, theme).map(([name, css, number]) => {
      const swatch = element("span", { className: "wb-swatch" });
      swatch.style.cssText = css;
      return [Object.assign(element("li", {}, swatch, name), { lane: !!figure.data[number].meta?.lane }), number];
    });
    this.legend.replaceChildren(...this.items.map(([item]) => item));
  }
  text(html) {
    const open = new Set([...this.body.querySelectorAll("details[open]")].map((d) => d.dataset.key));
    this.body.innerHTML = html;
    for (const d of this.body.querySelectorAll("details")) if (open.has(d.dataset.key)) d.open = true;
  }
  // What was really drawn, for tests and for the curious.
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
    button.onclick = () => {
      place.hidden = !place.hidden;
      button.setAttribute("aria-expanded", String(!place.hidden));
      this.hub.say({ kind: "table", view: this.holding.spec.name, open: !place.hidden });
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
  // Follow the run or hold a step still; hover names the span under the pointer.
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
    const most = spec.tools === "steps" ? [label("show ", width)] : []; // a report has its steps chosen
    this.head.append(element("span", { className: "wb-tools" }, button, slider, label("step ", box), ...most));
    this.hover();
  }
  hover() {
    const tip = element("div", { className: "wb-tip", hidden: true });
    this.el.append(tip);
    this.point = (event) => {
      this.pointer = event;
      const hit = event && this.picture.boxAt(event);
      tip.hidden = !hit;
      if (!hit) return;
      tip.replaceChildren(...describe(hit, this.holding.facts.names).map((line) => element("div", { textContent: line })));
      const frame = this.el.getBoundingClientRect();
      tip.style.top = `${event.clientY - frame.top + 14}px`;
      tip.style.left = `${Math.min(event.clientX - frame.left + 14, frame.width - tip.offsetWidth - 4)}px`;
    };
    this.body.addEventListener("mousemove", this.point);
    this.body.addEventListener("mouseleave", () => this.point(null));
    this.walk(tip);
  }
  // Arrow keys go from box to box, along a row and from row to row; what was being followed is held still for that.
  walk(tip) {
    const { body, picture } = this;
    Object.assign(body, { tabIndex: 0 });
    Object.assign(body.dataset, { lmSuppressShortcuts: "true" }); // see [Note: Keys] in controls.js
    body.setAttribute("role", "application");
    body.setAttribute("aria-label", "Boxes: arrow keys go from one to the next and name it");
    tip.setAttribute("role", "status");
    const stop = () => { this.box = null; tip.hidden = true; };
    body.addEventListener("keydown", (event) => {
      const [along, across] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
      if (event.key === "Escape") stop();
      if (along === undefined) return;
      event.preventDefault();
      if (this.holding.facts.follow) this.hub.say({ kind: "ask", view: this.holding.spec.name, request: { at: this.holding.facts.first } });
      this.box = this.beside(picture.rows(), along, across);
      if (!this.box) return stop();
      const { xaxis, yaxis } = picture.div._fullLayout, middle = (Math.max(this.box.x0, xaxis.range[0]) + this.box.x1) / 2;
      tip.replaceChildren(...describe(this.box, this.holding.facts.names).map((line) => element("div", { textContent: line })));
      tip.hidden = false;
      tip.style.top = `${body.offsetTop + yaxis._offset + yaxis.l2p(this.box.at) + 14}px`;
      tip.style.left = `${Math.max(0, Math.min(xaxis._offset + xaxis.l2p(middle), this.el.clientWidth - tip.offsetWidth - 4))}px`;
    });
    body.addEventListener("blur", stop);
  }
  // The box that lies `along` its row and `across` rows from the present one; the first of all if there is none.
  // Null where no box is in sight.
  beside(rows, along, across) {
    if (!this.box || !rows.length) return rows[0]?.[0] ?? null;
    const at = Math.max(0, rows.findIndex((row) => row[0].y === this.box.y)), x = this.box.x0;
    if (across) {
      const row = rows[at + across] ?? rows[at];
      return row.reduce((a, b) => (Math.abs(b.x0 - x) < Math.abs(a.x0 - x) ? b : a));
    }
    const place = rows[at].findIndex((box) => box.x0 === x && box.x1 === this.box.x1);
    return rows[at][Math.max(0, place + along)] ?? rows[at].at(-1);
  }
}
