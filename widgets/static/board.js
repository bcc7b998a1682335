// Board: the page half of widgets/board.py. Takes appended rows, draws changed charts and acknowledges what it drew.
// Follows chart.js and panel.js in one module. A Hub, one per page and model, keeps what outlives a redraw.

const PAGE = Math.random().toString(36).slice(2);

// The colours of the page, light or dark, from JupyterLab's theme or the system's preference.
function pageColours(el) {
  const own = el.closest(".twb-dark, .twb-light");
  const said = own ? String(own.classList.contains("twb-light")) : document.body.dataset.jpThemeLight;
  const dark = said ? said === "false"
    : document.body.classList.contains("vscode-dark") || matchMedia("(prefers-color-scheme: dark)").matches;
  const paper = getComputedStyle(el).getPropertyValue("--jp-layout-color0").trim() || (dark ? "#111111" : "#ffffff");
  return dark ? { dark, paper, ink: "#f2f2f2", muted: "#bdbdbd", faint: "#8a8a8a", grid: "#3d3d3d" }
    : { dark, paper, ink: "#1a1a1a", muted: "#565656", faint: "#8c8c8c", grid: "#e0e0e0" };
}

// plotly.js, once per page: window.__plotly is its promise. An answer may be lost, because a page that reconnects makes
// its models again and the old model receives nothing. Then the page asks again, after longer and longer pauses.
let asked = 0;
function plotly(model) {
  if (window.Plotly?.react) return Promise.resolve(window.Plotly);
  window.__plotly ??= new Promise((done, fail) => {
    const patience = 8 * 2 ** Math.min(asked++, 3);
    setTimeout(() => fail(new Error(`plotly.js did not come in ${patience} s`)), 1000 * patience);
    const take = async (message, buffers) => {
      if (message.kind !== "plotly") return;
      model.off("msg:custom", take);
      const stream = new Blob([buffers[0]]).stream().pipeThrough(new DecompressionStream("gzip"));
      const url = URL.createObjectURL(new Blob([await new Response(stream).arrayBuffer()], { type: "text/javascript" }));
      import(url).then(() => done(window.Plotly), fail).finally(() => URL.revokeObjectURL(url));
    };
    model.on("msg:custom", take);
    model.send({ kind: "plotly", page: PAGE });
  }).catch((error) => {
    window.__plotly = undefined;
    throw error;
  });
  return window.__plotly;
}

// The page's state of one board: its data, its places, and the answers that it owes.
class Hub {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.holdings = [];
    this.marks = [];
    this.epoch = 0;
    this.owed = null;
    this.greetings = 0;
    this.pulse = new Pulse(model, this.views);
    this.own = {};
    this.glanced = null;
    model.on("change:looks", () => this.relook());
    model.on("msg:custom", (message, buffers) => this.hear(message, buffers));
    document.addEventListener("visibilitychange", () => this.presence());
    new MutationObserver(() => this.repaint()).observe(document.body, { attributeFilter: ["data-jp-theme-light", "class"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }
  say(message) {
    this.model.send({ ...message, page: PAGE });
  }
  // What a person opened, pinned or highlighted. It is a trait, so that all pages agree and the kernel keeps it.
  get looks() {
    return this.model.get?.("looks") ?? this.own;
  }
  look(more) {
    this.own = { ...this.looks, ...more };
    this.model.set?.("looks", this.own);
    this.model.save_changes?.();
    this.relook();
  }
  relook() {
    for (const view of this.views) view.look();
    this.schedule();
  }
  // The rank with highlighted curves: the one under the pointer, else the chosen one.
  get lit() {
    return this.glanced ?? this.looks.rank ?? null;
  }
  light(rank) {
    this.glanced = rank;
    this.relook();
  }
  choose(rank) {
    this.look({ rank: this.looks.rank === rank ? null : rank });
  }
  get present() {
    return !document.hidden && [...this.views].some((view) => view.visible);
  }
  // Tells the kernel when the page begins or stops to show the board, and at intervals that it still does.
  presence() {
    const here = this.present;
    if (here && !this.beat) this.beat = setInterval(() => this.greet(), 2000);
    if (here !== this.here) this.pulse.begin();
    if (!here && this.beat) this.beat = clearInterval(this.beat);
    if (here && !this.here) this.greet();
    if (!here && this.here) this.say({ kind: "away" });
    this.here = here;
  }
  // A page that reconnects may lose its greeting or the answer. Until it knows a run it greets again, after longer pauses.
  greet() {
    const again = !this.holdings.length && Number.isInteger(Math.log2(++this.greetings));
    this.pulse.ask(() => this.say({ kind: again ? "hello" : "here" }));
  }
  hear(message, buffers) {
    const view = buffers?.[0];
    this.pulse.felt();
    if (message.kind === "open") this.open(message);
    if (message.kind === "tables") this.tabulate(message.tables);
    if (message.trouble) for (const view of this.views) view.trouble(message.trouble);
    if (message.kind !== "open" && message.kind !== "tick") return;
    if (message.run !== this.run) return this.say({ kind: "hello" });
    const buffer = view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : new ArrayBuffer(0);
    const known = Object.fromEntries(this.holdings.map((h) => [h.spec.name, h]));
    for (const [name, patch] of Object.entries(message.views)) known[name]?.apply(patch, buffer);
    if (message.marks) {
      this.marks = message.marks;
      for (const h of this.holdings) if (Object.keys(h.spec.axes).length) h.version++;
    }
    this.tabulate(message.tables ?? {});
    this.epoch = message.epoch ?? this.epoch; // a run's time begins when its ranks do
    this.owed = message.number;
    this.schedule();
  }
  open(message) {
    this.run = message.run;
    this.marks = [];
    this.holdings = message.specs.map((spec) => new Holding(spec));
    this.film = message.film;
    this.until = null;
    for (const view of this.views) view.fill();
  }
  tabulate(tables) {
    for (const view of this.views)
      for (const panel of view.panels) if (tables[panel.holding.spec.name]) panel.tabulate?.(tables[panel.holding.spec.name]);
  }
  repaint() {
    const view = [...this.views][0];
    if (view) this.theme = pageColours(view.el);
    this.schedule();
  }
  schedule() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => this.draw().then(() => (this.drawing = false), (error) => this.again(error)));
    if (!this.present) this.acknowledge();
  }
  again(error) { // without new rows, nothing else would draw the present data
    console.warn(error);
    this.drawing = false;
    setTimeout(() => this.schedule(), 1000);
  }
  // Draws the panels that are due, until time is up: the timeline first, then the panels drawn longest ago. It also checks
  // for a changed width, because a ResizeObserver misses a short change, as while JupyterLab changes its theme.
  async draw() {
    const Plotly = await plotly(this.model);
    for (let round = 0; round < 50; round++) {
      const began = performance.now();
      const panels = [...this.views].flatMap((v) => v.panels.filter((p) => p.due(began)));
      if (!panels.length) break;
      panels.sort((a, b) => (a.at ?? 0) - (b.at ?? 0));
      const first = panels.findIndex((p) => p.holding.spec.tools);
      if (first > 0) panels.unshift(...panels.splice(first, 1));
      for (const panel of panels) {
        if (performance.now() - began > 60) break;
        await panel.draw(Plotly).catch((error) => this.failed(panel, error));
      }
      this.acknowledge();
      await new Promise((done) => setTimeout(done, 0));
    }
    this.acknowledge();
    requestAnimationFrame(() => this.views.forEach((view) => view.resize()));
    if ([...this.views].some((v) => v.panels.some((p) => p.dirty)))
      this.later ??= setTimeout(() => ((this.later = null), this.schedule()), 500);
  }
  failed(panel, error) {
    console.error(`board: ${panel.holding.spec.name}`, error);
    panel.vacant.hidden = false;
    panel.vacant.textContent = `This chart could not be drawn: ${error.message}`;
    panel.version = panel.holding.version;
    [panel.theme, panel.redraw] = [this.theme, false];
  }
  acknowledge() {
    if (this.owed === null) return;
    this.say({ kind: "ack", number: this.owed });
    this.owed = null;
  }
}

// One place of the page that shows the board.
class Place {
  constructor(hub, el) {
    this.hub = hub;
    this.el = element("div", { className: "wb-board" });
    el.append(this.el);
    this.panels = [];
    this.visible = true;
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.el);
    this.sight = new IntersectionObserver((seen) => this.see(seen), { rootMargin: "100px" });
    this.sight.observe(this.el);
    this.el.append(element("p", { className: "wb-empty", textContent:
      "The charts appear when the run starts. After a restart of the kernel, run the cell again." }));
    this.fill();
  }
  fill() {
    if (!this.hub.holdings.length) return;
    this.panels = this.hub.holdings.map((holding) => new Panel(this.hub, holding));
    this.player?.pause();
    this.player = this.hub.film && new Player(this.hub, this.hub.film);
    this.el.replaceChildren(...(this.player ? [this.player.el] : []), ...this.panels.map((p) => p.el));
    if (this.el.closest(".wb-kept")) this.player?.follow();
    this.hub.pulse.tell();
    for (const panel of this.panels) this.sight.observe(panel.el);
    this.look();
    this.resize();
  }
  look() {
    const { theme } = this.hub.looks, whole = this.el.closest(".twb-dashboard");
    for (const name of ["light", "dark"]) whole?.classList.toggle(`twb-${name}`, theme === name);
    if (whole && theme !== this.theme) {
      this.theme = theme;
      this.hub.repaint();
    }
    for (const panel of this.panels) panel.look();
  }
  see(entries) {
    for (const { target, isIntersecting } of entries) {
      if (target === this.el) this.visible = isIntersecting;
      const panel = this.panels.find((p) => p.el === target);
      if (panel) panel.visible = isIntersecting;
    }
    if (this.visible && this.theme !== this.hub.looks.theme) this.look();
    folds(this.el.closest(".twb-dashboard"));
    this.hub.presence();
    this.hub.schedule();
  }
  resize() {
    const wide = this.el.clientWidth;
    this.el.classList.toggle("wb-narrow", wide < 1000);
    this.el.classList.toggle("wb-small", wide < 720);
    this.el.classList.toggle("wb-slim", wide < 520);
    for (const panel of this.panels) {
      const low = wide < 720 ? 0.8 : 0;
      if (!panel.picture || panel.body.hidden) continue;
      if (panel.picture.width === panel.picture.div.clientWidth && panel.low === low) continue;
      [panel.low, panel.redraw] = [low, true];
    }
    if (this.panels.some((panel) => panel.dirty)) this.hub.schedule();
  }
  trouble(text) {
    this.notice ??= element("p", { className: "wb-trouble", role: "alert" });
    this.notice.textContent = text;
    if (!this.notice.isConnected) this.el.prepend(this.notice);
  }
  // Disables the controls that ask the kernel, on the whole dashboard, and says why; or enables them again.
  cut(why) {
    const whole = this.el.closest(".twb-dashboard") ?? this.el;
    whole.classList.toggle("twb-cut", !!why);
    for (const part of whole.querySelectorAll(".twb-left, .twb-fold, .wb-tools, .wb-head .wb-button")) part.inert = !!why;
    for (const bar of whole.querySelectorAll(".twb-transport")) bar.dispatchEvent(new CustomEvent("twb-cut", { detail: why }));
    this.apart ??= element("p", { className: "wb-trouble wb-apart", role: "alert" });
    this.apart.textContent = why;
    if (why && !this.apart.isConnected) this.el.prepend(this.apart);
    if (!why) this.apart.remove();
  }
  remove() {
    this.player?.pause();
    this.resized.disconnect();
    this.sight.disconnect();
    for (const panel of this.panels) if (panel.picture && window.Plotly) window.Plotly.purge(panel.picture.div);
    this.el.remove();
  }
}

export default () => {
  let hub = null;
  return {
    initialize({ model }) {
      hearing({ model });
      hub = new Hub(model); // not on a view's model, which receives nothing once its view is gone
    },
    render({ el }) {
      const place = new Place(hub, el);
      hub.views.add(place);
      hub.pulse.tell();
      hub.repaint();
      hub.presence();
      return () => {
        hub.views.delete(place);
        place.remove();
        hub.presence();
      };
    },
  };
};
