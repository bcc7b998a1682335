// Does a kernel still answer this page? Every greeting wants an answer. Without one, all places of the board say so.
// Precedes board.js in one module.

const PATIENCE = 15000; // ms of silence; a kernel on a busy machine may take some seconds
const CUT = 3000; // ms, after the notebook itself reports that the connection is gone
const GONE = "The kernel of this page is gone. The page shows its last data. When a kernel runs again, run the cell again.";
const SILENT = `The kernel has not answered for ${PATIENCE / 1000} s: it is busy or gone, or this page has lost its connection. `
  + "The page shows its last data. If this stays and the kernel is idle, reload the page and run the cell again.";

class Pulse {
  constructor(model, places) {
    this.places = places;
    this.why = "";
    this.begin();
    model.on("comm_live_update", () => this.look());
  }
  // The page is visible again: silence while it was hidden does not count.
  begin() {
    this.since = performance.now();
    this.asked = null;
  }
  felt() {
    this.begin();
    this.tell("");
  }
  ask(greet) {
    try {
      greet();
      this.asked ??= performance.now();
    } catch {
      this.tell(GONE); // a greeting has no connection to use
    }
    this.look();
  }
  get cut() {
    return [...this.places].some((place) => place.el.closest(".jupyter-widgets-disconnected"));
  }
  look() {
    clearTimeout(this.later);
    if (this.asked === null || this.why === GONE) return; // a silent kernel may turn out to be gone
    const why = this.cut ? GONE : SILENT;
    const patience = this.cut ? CUT : PATIENCE, waited = performance.now() - this.asked;
    if (waited >= patience) {
      if (why !== this.why) this.tell(why);
    } else this.later = setTimeout(() => this.look(), patience - waited + 50);
  }
  tell(why = this.why) {
    const changed = why !== this.why || why;
    this.why = why;
    if (changed) for (const place of this.places) place.cut(why);
  }
}
