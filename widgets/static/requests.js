// The requested changes and their outcomes: requested, applied at a step, or refused with a reason.

const KEYS = ["button", "summary", "textarea", "ol"]; // see [Note: Keys] in controls.js
const el = (tag, cls, attrs = {}) => {
  const made = Object.assign(document.createElement(tag), { className: cls }, attrs);
  if (KEYS.includes(tag)) made.dataset.lmSuppressShortcuts = "true";
  return made;
};
const SIGN = { waiting: "…", applied: "✓", refused: "✗", set: "✓" };

function line(item) {
  const row = el("li", `twb-request twb-${item.state}`);
  row.dataset.state = item.state;
  row.dataset.path = item.path;
  const sign = el("span", "twb-sign", { textContent: SIGN[item.state] });
  sign.setAttribute("aria-hidden", "true");
  const what = el("b", "twb-what", { textContent: item.text, title: item.path });
  const said = el("span", "twb-said", { textContent: item.said });
  const when = el("time", "twb-when", { textContent: item.when });
  row.append(sign, what, when, said);
  return row;
}

function render({ model, el: root }) {
  root.className = "twb twb-requests";
  const head = el("h3", "twb-title", { textContent: "Changes" });
  const list = el("ol", "twb-list");
  list.setAttribute("aria-live", "polite");
  list.setAttribute("aria-label", "Changes, newest first");
  list.tabIndex = 0;
  root.append(head, list);
  const update = () => {
    const items = model.get("items");
    const empty = el("li", "twb-said", { textContent: "Your changes appear here with the step at which all ranks apply them." });
    list.replaceChildren(...(items.length ? items.map(line) : [empty]));
  };
  model.on("change:items", update);
  update();
  return () => model.off("change:items", update);
}

export default { initialize: hearing, render };
