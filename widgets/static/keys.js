// Keys on what ipywidgets makes: its sliders and buttons keep theirs in JupyterLab, and its folds are opened by them.
// Goes before board.js in one module.

const FOLDS = ".twb-fold .jupyter-widget-Collapse-header, .twb-fold .lm-AccordionPanel-title";

// A fold's head is nothing to a keyboard as ipywidgets makes it: here it is a button that says whether it is open.
const folds = (whole) => {
  for (const head of whole?.querySelectorAll(FOLDS) ?? []) {
    const open = head.closest(".jupyter-widget-Collapse")?.classList.contains("jupyter-widget-Collapse-open");
    Object.assign(head, { tabIndex: 0, role: "button", ariaExpanded: String(open ?? head.classList.contains("lm-mod-expanded")) });
  }
};

// JupyterLab takes arrow keys, Enter and Space from whatever is focused, unless that says that it wants them: see [Note: Keys]
// in controls.js.
document.addEventListener?.("focusin", ({ target }) => {
  if (target.closest?.(".twb-dashboard")) target.dataset.lmSuppressShortcuts = "true";
});
document.addEventListener?.("keydown", (event) => {
  if (event.defaultPrevented || !event.target.matches?.(FOLDS) || !["Enter", " "].includes(event.key)) return; // by another board
  event.preventDefault();
  event.target.click();
});
document.addEventListener?.("click", ({ target }) => {
  const whole = target.closest?.(FOLDS)?.closest(".twb-dashboard");
  if (whole) setTimeout(() => folds(whole));
});
