// Draws the rows that Python makes from the knobs, with the browser's own inputs, and sends back a person's
// requests. It knows no knob by name. It updates rows in place, so that focus is never lost.

// [Note: Keys] JupyterLab takes arrow keys, Enter and Space from every focused element that is no text field,
// unless the element itself asks for them.
const KEYS = ["input", "select", "button", "summary"];
const el = (tag, cls, attrs = {}) => {
  const made = Object.assign(document.createElement(tag), { className: cls }, attrs);
  if (KEYS.includes(tag)) made.dataset.lmSuppressShortcuts = "true";
  return made;
};
const GREY = "Grey options would be refused now. Choose one to read why.";
const sentence = (text) => (text && !/[.!?]$/.test(text) ? `${text}.` : text);
let made = 0;

class RowView {
  constructor(panel, row) {
    this.panel = panel;
    this.kind = row.kind;
    this.id = `twb-row-${++made}`;
    this.root = el("div", `twb-row twb-is-${row.kind}`);
    this.root.dataset.path = row.path;
    this.label = el("label", "twb-label", { htmlFor: this.id });
    this.error = el("p", "twb-error", { id: `${this.id}-error`, hidden: true });
    this.error.setAttribute("role", "alert");
    this.more = el("span", "twb-sr", { id: `${this.id}-doc` });
    this[`make_${row.kind}`](row);
    this.root.append(this.more, this.error);
    for (const type of ["focusin", "pointerenter"]) this.root.addEventListener(type, () => panel.help(this.row));
    this.update(row);
  }
  inputs() { return this.root.querySelectorAll("input,select,button"); }
  send(value) { this.panel.send({ change: this.row.path, value, number: this.kind === "number" }); }

  make_number(row) {
    const head = el("div", "twb-head");
    this.entry = el("input", "twb-entry", { type: "text", id: this.id, autocomplete: "off", spellcheck: false });
    this.entry.inputMode = "decimal";
    this.entry.addEventListener("input", () => { this.typing = true; });
    this.entry.addEventListener("blur", () => this.typed());
    this.entry.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.typed();
      if (event.key === "Escape") this.undo();
    });
    head.append(this.label, this.entry);
    this.root.append(head);
    this.slider = el("input", "twb-slider", { type: "range", min: 0, step: 1, id: `${this.id}-slider` });
    this.slider.addEventListener("input", () => { this.moving = true; this.preview(); });
    this.slider.addEventListener("change", () => { clearTimeout(this.due); this.due = setTimeout(() => this.slid(), 150); });
    if (row.stops.length) this.root.append(this.slider);
  }
  slid() { // once per drag, or once after a series of arrow keys
    this.moving = false;
    this.send(this.row.stops[+this.slider.value]);
  }
  typed() {
    if (!this.typing) return;
    this.typing = false;
    this.send(this.entry.value.trim());
  }
  undo() {
    this.typing = false;
    this.entry.value = this.row.value;
  }
  preview() {
    this.entry.value = this.row.stops[+this.slider.value];
    this.fill();
  }
  fill() {
    const share = this.row.stops.length > 1 ? +this.slider.value / (this.row.stops.length - 1) : 0;
    this.slider.style.setProperty("--twb-share", `${share * 100}%`);
    this.slider.setAttribute("aria-valuetext", `${this.entry.value} ${this.row.unit}`.trim());
  }
  update_number(row) {
    this.slider.setAttribute("aria-label", `${row.label} slider`);
    if (this.moving) return;
    if (!this.typing && !row.error) this.entry.value = row.value;
    this.slider.max = row.stops.length - 1;
    this.slider.value = row.at;
    if (row.stops.length) this.fill();
  }

  make_choice() {
    const head = el("div", "twb-head");
    this.select = el("select", "twb-select", { id: this.id });
    this.select.addEventListener("change", () => { clearTimeout(this.due); this.due = setTimeout(() => this.chose(), 350); });
    head.append(this.label, this.select);
    this.root.append(head);
  }
  chose() { // once after a series of keys, because arrows and letters pass over other options
    this.due = 0;
    this.send(this.row.options[+this.select.value].value);
  }
  update_choice(row) {
    const said = JSON.stringify(row.options.map((o) => [o.text, o.refused]));
    if (said !== this.said) {
      const at = this.select.value;
      const blank = el("option", "", { value: -1, textContent: "choose …", disabled: true, hidden: true });
      const groups = new Map();
      row.options.forEach((o, i) => {
        const text = o.refused ? `${o.text} (refused here)` : o.text;
        const into = groups.get(o.group ?? "") ?? [];
        groups.set(o.group ?? "", [...into, el("option", o.refused ? "twb-refused" : "", { value: i, textContent: text, title: o.doc })]);
      });
      this.select.replaceChildren(blank, ...[...groups].flatMap(([label, all]) => {
        if (!label) return all;
        const group = el("optgroup", "", { label });
        group.append(...all);
        return [group];
      }));
      this.said = said;
      this.select.value = at;
    }
    if (!this.due) this.select.value = row.index;
  }

  make_check() {
    const head = el("div", "twb-head");
    this.box = el("input", "twb-box", { type: "checkbox", id: this.id });
    this.box.addEventListener("change", () => this.send(this.box.checked));
    head.append(this.label, this.box);
    this.root.append(head);
  }
  update_check(row) { this.box.checked = row.value; }

  make_text() {
    const head = el("div", "twb-head");
    this.entry = el("input", "twb-entry", { type: "text", id: this.id });
    this.entry.addEventListener("input", () => { this.typing = true; });
    this.entry.addEventListener("blur", () => this.typed());
    this.entry.addEventListener("keydown", (event) => { if (event.key === "Enter") this.typed(); });
    head.append(this.label, this.entry);
    this.root.append(head);
  }
  update_text(row) { if (!this.typing && !row.error) this.entry.value = row.value; }

  make_button() {
    const head = el("div", "twb-head");
    this.text = el("span", "twb-label");
    this.button = el("button", "twb-button", { type: "button" });
    this.button.addEventListener("click", () => this.panel.send({ press: this.row.path }));
    head.append(this.text, this.button);
    this.root.append(head);
  }
  update_button(row) {
    this.text.textContent = row.text;
    this.button.textContent = row.button;
    this.button.setAttribute("aria-label", `${row.button} ${row.text}`.trim());
  }

  update(row) {
    this.row = row;
    this.root.dataset.level = row.level;
    this.root.dataset.value = row.options?.[row.index]?.text ?? row.value ?? row.text ?? "";
    this.root.classList.toggle("twb-waiting", row.waiting);
    const unit = el("span", "twb-unit", { textContent: row.unit ? ` ${row.unit}` : "" });
    const said = `${row.label}/${row.unit}/${row.waiting}`;
    if (said !== this.labelled) {
      this.label.replaceChildren(row.label, unit, el("span", "twb-due", { textContent: row.waiting ? " requested" : "" }));
      this.labelled = said;
    }
    this[`update_${row.kind}`](row);
    this.root.title = row.why || [row.doc, row.allowed].filter(Boolean).join(" · ");
    this.more.textContent = `${row.doc}. ${row.allowed}. ${row.why}`;
    this.error.hidden = !row.error;
    if (this.error.textContent !== row.error) this.error.textContent = row.error;
    for (const input of this.inputs()) {
      input.disabled = row.disabled;
      input.setAttribute("aria-describedby", `${this.id}-doc ${this.id}-error`);
      input.setAttribute("aria-invalid", Boolean(row.error));
    }
  }
}

class Panel {
  constructor(model, root) {
    this.model = model;
    this.views = new Map();
    this.groups = new Map();
    this.root = root;
    root.className = "twb twb-controls";
    this.list = el("div", "twb-list");
    this.hint = el("p", "twb-help");
    root.append(this.list, this.hint);
    this.help(null);
  }
  send(message) { this.model.send(message); }
  help(row) {
    const grey = row?.options?.some((o) => o.refused) && GREY;
    const words = row ? [sentence(row.doc), row.allowed && `Takes ${row.allowed}.`, grey, row.why] : ["Point at a control to read what it does."];
    const name = row?.label ? [el("b", "", { textContent: row.label }), ": "] : [];
    this.hint.replaceChildren(...name, words.filter(Boolean).join(" ").replaceAll("`", ""));
    this.shown = row?.path;
  }
  group(name) {
    if (!name) return this.list;
    if (!this.groups.has(name)) {
      const details = el("details", "twb-group");
      details.dataset.group = name;
      details.append(el("summary", "", { textContent: name }));
      details.open = this.model.get("opened").includes(name);
      details.addEventListener("toggle", () => this.unfolded(name, details.open));
      this.list.append(details);
      this.groups.set(name, details);
    }
    return this.groups.get(name);
  }
  unfolded(name, open) {
    const opened = this.model.get("opened");
    if (opened.includes(name) === open) return;
    this.model.set("opened", open ? [...opened, name] : opened.filter((other) => other !== name));
    this.model.save_changes();
  }
  unfold() {
    for (const [name, details] of this.groups) details.open = this.model.get("opened").includes(name);
  }
  update(rows) {
    const seen = new Set();
    const last = new Map();
    for (const row of rows) {
      const key = `${row.path}|${row.kind}`;
      seen.add(key);
      const home = this.group(row.group);
      if (!this.views.has(key)) this.views.set(key, new RowView(this, row));
      else this.views.get(key).update(row);
      const { root } = this.views.get(key);
      const after = last.get(home) ?? (home === this.list ? null : home.firstElementChild);
      const wanted = after ? after.nextElementSibling : home.firstElementChild;
      if (wanted !== root) home.insertBefore(root, wanted);
      last.set(home, root);
    }
    for (const [key, view] of this.views) if (!seen.has(key)) { view.root.remove(); this.views.delete(key); }
  }
}

function render({ model, el: root }) {
  const panel = new Panel(model, root);
  const update = () => panel.update(model.get("rows"));
  const unfold = () => panel.unfold();
  model.on("change:rows", update);
  model.on("change:opened", unfold);
  update();
  return () => {
    model.off("change:rows", update);
    model.off("change:opened", unfold);
  };
}

export default { initialize: hearing, render };
