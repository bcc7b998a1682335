// Plays a recorded run. Time advances by itself or by hand, and the board shows that moment. Precedes board.js in one module.
// The page cuts curves and marks. It asks the timeline for the step of the moment (see widgets/film.py).

const SPEEDS = [1, 10, 100, 1000];

class Player {
  constructor(hub, film) {
    this.hub = hub;
    this.film = film;
    [this.begin, this.end] = [film.begin, film.steps.at(-1)[0]];
    this.at = this.end;
    const quick = this.end - this.begin > 60; // a long run plays faster than its own speed
    this.button = element("button", { type: "button", className: "wb-button wb-play" });
    this.slider = element("input", { type: "range", min: this.begin, max: this.end, step: "any", value: this.end, className: "wb-film" });
    this.slider.setAttribute("aria-label", "Time of the run");
    this.speed = element("select", { className: "wb-steps" }, ...SPEEDS.map((n) => element("option", { value: n, textContent: `${n}x` })));
    this.speed.value = quick ? 10 : 1;
    this.said = element("span", { className: "wb-moment" });
    this.knobs = element("ul", { className: "wb-then" });
    this.whole = element("button", { type: "button", className: "wb-button", textContent: "Show whole run" });
    this.el = element("section", { className: "wb-player" }, element("div", { className: "wb-tools" }, this.button, this.slider,
      element("label", { className: "wb-label" }, "speed ", this.speed), this.whole, this.said), this.knobs);
    this.el.setAttribute("role", "region");
    this.el.setAttribute("aria-label", "Player: shows the run at a chosen time");
    for (const part of [this.button, this.slider, this.speed, this.whole]) part.dataset.lmSuppressShortcuts = "true";
    this.button.onclick = () => (this.timer ? (this.pause(), this.address()) : this.play());
    this.slider.oninput = () => { this.pause(); this.go(Number(this.slider.value)); };
    this.slider.onchange = () => this.address(); // only when released, because browsers take few new addresses a second
    this.whole.onclick = () => { this.pause(); this.go(this.end); this.address(); };
    this.pause();
    this.show();
  }
  // On a page of its own the address names the shown moment, so that people can share it: run.html#at=12.5
  follow() {
    this.named = true;
    const at = Number(/^#at=(\d+(?:\.\d+)?)$/.exec(location.hash)?.[1] ?? NaN);
    if (at < this.end) this.go(at);
  }
  address() {
    if (!this.named) return;
    const whole = location.pathname + location.search;
    history.replaceState(null, "", this.at < this.end ? `#at=${Math.max(this.at, 0).toFixed(3)}` : whole);
  }
  play() {
    if (this.at >= this.end) this.at = this.begin;
    let before = performance.now();
    this.timer = setInterval(() => {
      const now = performance.now();
      this.go(this.at + ((now - before) / 1000) * Number(this.speed.value));
      before = now;
      if (this.at >= this.end) this.pause();
    }, CALM.matches ? 1000 : 100);
    this.button.textContent = "❚❚ Pause";
    this.said.setAttribute("aria-live", "off"); // a screen reader would speak ten times a second
  }
  pause() {
    this.timer = clearInterval(this.timer);
    this.button.textContent = "▶ Play";
    this.said.setAttribute("aria-live", "polite");
  }
  // The last step that had ended everywhere by `t`, interpolated between known steps.
  step(t) {
    const { steps } = this.film, after = steps.findIndex(([end]) => end > t);
    if (after < 0) return steps.at(-1)[1];
    if (!after) return steps[0][1] - 1;
    const [[t0, s0], [t1, s1]] = [steps[after - 1], steps[after]];
    return Math.floor(s0 + ((s1 - s0) * (t - t0)) / Math.max(t1 - t0, 1e-12));
  }
  go(t) {
    this.at = Math.min(Math.max(t, this.begin), this.end);
    this.slider.value = this.at;
    const whole = this.at >= this.end, step = this.step(this.at);
    this.hub.until = whole ? null : { t: this.at, step };
    for (const holding of this.hub.holdings) {
      holding.until = this.hub.until;
      if (Object.keys(holding.spec.axes).length && !holding.spec.tools) holding.version++;
      if (holding.spec.tools && step !== this.asked && !this.waits) {
        this.waits = setTimeout(() => (this.waits = null, this.ask(holding)), 200); // at most five a second
      }
    }
    this.show();
    this.hub.schedule();
  }
  ask(holding) {
    this.asked = this.step(this.at);
    this.hub.say({ kind: "ask", view: holding.spec.name, request: { at: Math.max(this.asked, this.film.steps[0][1]) } });
  }
  show() {
    const step = this.step(this.at), now = this.film.settings.filter(([t]) => t <= this.at).at(-1) ?? this.film.settings[0];
    const last = this.film.steps.at(-1)[1];
    this.said.textContent = `step ${Math.max(step, 0)} of ${last}, ${this.at.toFixed(1)} of ${this.end.toFixed(1)} s`;
    if (now === this.shown) return;
    this.shown = now;
    this.knobs.replaceChildren(...now[2].map(([name, words, since]) => {
      const item = element("li", {}, `${name} `, element("b", { textContent: words }));
      if (since !== null) item.append(` since step ${since}`);
      return item;
    }));
  }
}
