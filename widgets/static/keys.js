// Keys for the elements of ipywidgets. Its sliders and buttons keep their keys in JupyterLab, and keys open its folds.
// Precedes board.js in one module.

const FOLDS = ".twb-fold .jupyter-widget-Collapse-header, .twb-fold .lm-AccordionPanel-title";

// ipywidgets makes a fold's head that no keyboard can reach. This makes it a button that says whether it is open.
const folds = (whole) => {
  for (const head of whole?.querySelectorAll(FOLDS) ?? []) {
    const open = head.closest(".jupyter-widget-Collapse")?.classList.contains("jupyter-widget-Collapse-open");
    Object.assign(head, { tabIndex: 0, role: "button", ariaExpanded: String(open ?? head.classList.contains("lm-mod-expanded")) });
  }
};

// JupyterLab takes arrow keys, Enter and Space from every focused element that does not ask for them: see [Note: Keys]
// in controls.js.
document.addEventListener?.("focusin", ({ target }) => {
  if (target.closest?.(".twb-dashboard")) target.dataset.lmSuppressShortcuts = "true";
});
document.addEventListener?.("keydown", (event) => {
  if (event.defaultPrevented || !event.target.matches?.(FOLDS) || !["Enter", " "].includes(event.key)) return; // another board handled it
  event.preventDefault();
  event.target.click();
});
document.addEventListener?.("click", ({ target }) => {
  const whole = target.closest?.(FOLDS)?.closest(".twb-dashboard");
  if (whole) setTimeout(() => folds(whole));
});
