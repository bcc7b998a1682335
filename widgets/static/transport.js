// Start, Pause, Step, Stop and Checkpoint, a line on what the run does, and the error that ended it.

const KEYS = ["button", "summary", "textarea", "ol"]; // see [Note: Keys] in controls.js
const el = (tag, cls, attrs = {}) => {
  const made = Object.assign(document.createElement(tag), { className: cls }, attrs);
  if (KEYS.includes(tag)) made.dataset.lmSuppressShortcuts = "true";
  return made;
};
const SIGN = { start: "▶", pause: "❚❚", resume: "▶", step: "▶❙", stop: "■", checkpoint: "⤓" };

function asksForStacks(model, textContent) {
  const button = el("button", "twb-button twb-quiet twb-stacks", { type: "button", textContent });
  button.title = "show the call stacks of all ranks, even of a hanging one";
  button.addEventListener("click", () => model.send({ do: "stacks" }));
  return button;
}

function bar(model) {
  const root = el("div", "twb-bar");
  root.setAttribute("role", "toolbar");
  root.setAttribute("aria-label", "Run");
  const buttons = {};
  for (const name of ["start", "pause", "step", "stop", "checkpoint"]) {
    const button = el("button", "twb-button", { type: "button" });
    button.dataset.do = name;
    button.addEventListener("click", () => model.send({ do: button.dataset.do }));
    buttons[name] = button;
    root.append(button);
  }
  const state = el("span", "twb-state");
  state.setAttribute("role", "status");
  const copy = el("button", "twb-button twb-quiet", { type: "button", textContent: "Copy as Python" });
  copy.addEventListener("click", () => model.send({ do: "copy" }));
  const stacks = asksForStacks(model, "Stacks");
  const dock = el("button", "twb-button twb-quiet twb-dock", { type: "button", textContent: "Dock" });
  dock.title = "show the dashboard in a panel beside the notebook";
  dock.addEventListener("click", () => model.send({ do: "dock" }));
  root.append(state, stacks, copy, dock);
  let cut = ""; // why the kernel cannot be asked; the board finds it out and says it
  const update = () => {
    const may = cut ? {} : model.get("may");
    const pause = may.resume ? "resume" : "pause";
    for (const [slot, button] of Object.entries(buttons)) {
      const name = slot === "pause" ? pause : slot;
      button.dataset.do = name;
      button.disabled = !may[name];
      const sign = el("span", "twb-sign", { textContent: SIGN[name] });
      sign.setAttribute("aria-hidden", "true");
      if (button.dataset.shows !== name) button.replaceChildren(sign, name[0].toUpperCase() + name.slice(1));
      button.dataset.shows = name;
      button.title = model.get("why")[name] ?? "";
    }
    copy.disabled = stacks.disabled = dock.disabled = !!cut;
    dock.hidden = !model.get("docks");
    for (const part of [...Object.values(buttons), stacks, copy]) part.hidden = model.get("read_only");
    state.dataset.state = cut ? "gone" : model.get("state");
    state.textContent = cut ? `no kernel answers · last: ${model.get("line")}` : model.get("line");
  };
  root.parted = (why) => { cut = why; update(); };
  for (const trait of ["may", "state", "line", "why", "docks"]) model.on(`change:${trait}`, update);
  update();
  return root;
}

// Long activities, each with a bar if its progress is known, and the time to go.
function worksBox(model) {
  const root = el("div", "twb-works");
  const update = () => {
    const works = model.get("works") ?? [];
    root.hidden = !works.length;
    works.forEach(({ what, share, said }, i) => {
      const row = root.children[i] ?? root.appendChild(el("div", "twb-work"));
      if (!row.children.length) row.append(el("progress", "", { max: 1 }), el("span", ""));
      const [bar, text] = row.children;
      if (share < 0) bar.removeAttribute("value");
      else bar.value = share;
      bar.setAttribute("aria-label", what);
      bar.setAttribute("aria-valuetext", said);
      text.textContent = said;
      row.className = what === "the run" ? "twb-work twb-whole" : "twb-work"; // the line above says the rest
    });
    while (root.children.length > works.length) root.lastChild.remove();
  };
  model.on("change:works", update);
  update();
  return root;
}

function errorBox(model) {
  const root = el("div", "twb-alert", { hidden: true });
  root.setAttribute("role", "alert");
  const update = () => {
    const error = model.get("error");
    root.hidden = !error.text;
    if (root.hidden) return root.replaceChildren();
    const head = el("p", "twb-alert-head");
    const sign = el("span", "twb-sign", { textContent: "⚠" });
    sign.setAttribute("aria-hidden", "true");
    head.append(sign, el("b", "", { textContent: error.title }), ` ${error.text}`);
    root.replaceChildren(head);
    if (error.stacks) root.append(asksForStacks(model, "Stacks of all ranks"));
    if (error.more) {
      const details = el("details");
      details.append(el("summary", "", { textContent: "where it happened" }), el("pre", "", { textContent: error.more }));
      root.append(details);
    }
  };
  model.on("change:error", update);
  update();
  return root;
}

function codeBox(model) {
  const root = el("div", "twb-code", { hidden: true });
  const text = el("textarea", "twb-python", { readOnly: true, spellcheck: false });
  const said = el("span", "twb-said");
  said.setAttribute("role", "status");
  const close = el("button", "twb-button twb-quiet", { type: "button", textContent: "Close" });
  close.addEventListener("click", () => { root.hidden = true; });
  const foot = el("div", "twb-bar");
  foot.append(said, close);
  root.append(text, foot);
  model.on("msg:custom", async ({ python, stacks }) => {
    if (python === undefined && stacks === undefined) return;
    root.hidden = false;
    text.setAttribute("aria-label", stacks === undefined ? "This run as Python" : "The stacks of all ranks");
    text.value = python ?? stacks;
    text.rows = Math.min(16, text.value.split("\n").length + 1);
    text.focus();
    if (stacks !== undefined) {
      said.textContent = "The call stack of every thread of every rank, newest call last.";
      return text.setSelectionRange(0, 0);
    }
    text.select();
    text.scrollTop = 0;
    const done = await navigator.clipboard?.writeText(python).then(() => true, () => false) || document.execCommand("copy");
    said.textContent = done ? "Copied. Paste it into a cell to repeat this run." : "Press Ctrl+C to copy.";
  });
  return root;
}

function render({ model, el: root }) {
  root.className = "twb twb-transport";
  const handles = bar(model);
  root.addEventListener("twb-cut", ({ detail }) => handles.parted(detail));
  root.append(handles, worksBox(model), errorBox(model), codeBox(model));
}

export default { initialize: hearing, render };
