// The training ranks: buttons to evict, freeze, thaw, preempt or kill one, and the number of ranks that train.

const KEYS = ["input", "select", "button", "summary"]; // see [Note: Keys] in controls.js
const el = (tag, cls, attrs = {}) => {
  const made = Object.assign(document.createElement(tag), { className: cls }, attrs);
  if (KEYS.includes(tag)) made.dataset.lmSuppressShortcuts = "true";
  return made;
};
const NAMES = { evict: "Evict", freeze: "Freeze", thaw: "Thaw", preempt: "Preempt", kill: "Kill",
  profile: "Profile" };

function render({ model, el: root }) {
  root.className = "twb twb-members";
  const details = el("details", "twb-group");
  details.append(el("summary", "", { textContent: "ranks" }));
  const rank = el("select", "twb-select");
  rank.setAttribute("aria-label", "rank");
  const head = el("div", "twb-head"), bar = el("div", "twb-bar");
  head.append(el("span", "twb-label", { textContent: "rank" }), rank);
  const buttons = Object.entries(NAMES).map(([name, textContent]) => {
    const button = el("button", "twb-button", { type: "button", textContent });
    button.dataset.do = name;
    button.addEventListener("click", () => model.send({ do: name, rank: +rank.value }));
    return button;
  });
  bar.append(...buttons);
  const foot = el("div", "twb-head");
  const many = el("input", "twb-entry", { type: "text", autocomplete: "off", spellcheck: false });
  many.inputMode = "numeric";
  many.setAttribute("aria-label", "how many ranks train");
  const train = el("button", "twb-button", { type: "button", textContent: "Resize" });
  train.dataset.do = "resize";
  train.addEventListener("click", () => model.send({ do: "resize", ranks: many.value.trim() }));
  foot.append(el("span", "twb-label", { textContent: "ranks that train" }), many, train);
  const error = el("p", "twb-error", { hidden: true });
  error.setAttribute("role", "alert");
  details.append(head, bar, foot, error);
  root.append(details);
  details.addEventListener("toggle", () => {
    if (model.get("opened") === details.open) return;
    model.set("opened", details.open);
    model.save_changes();
  });
  let shown = "";
  const update = () => {
    const ranks = model.get("ranks");
    if (shown !== ranks.join()) {
      const was = rank.value;
      rank.replaceChildren(...ranks.map((r) => el("option", "", { value: r, textContent: `rank ${r}` })));
      if (ranks.includes(+was) && was) rank.value = was;
      shown = ranks.join();
      many.value = ranks.length || "";
    }
    for (const input of [rank, many, train, ...buttons]) {
      input.disabled = !ranks.length;
      input.title = ranks.length ? model.get("why")[input.dataset.do] ?? "" : "there is no run";
    }
    details.open = model.get("opened");
    many.title = `from 1 to ${model.get("most")}`;
    error.hidden = !model.get("error");
    error.textContent = model.get("error");
  };
  for (const trait of ["ranks", "most", "why", "error", "opened"]) model.on(`change:${trait}`, update);
  update();
}

export default { initialize: hearing, render };
