// Does a kernel still answer this page? Every greeting wants an answer; where none comes, all places of the board say so.
// Goes before board.js in one module.

const PATIENCE = 15000; // ms without a word; a kernel on a busy machine may take some seconds
const CUT = 3000; // ms, once the notebook itself says that the connection is gone
const GONE = "The kernel of this page is gone: what is shown is the last that came from it. If the kernel runs again, run the cell again.";
const SILENT = `The kernel has not answered for ${PATIENCE / 1000} s: it is busy or gone, or this page has lost its line to it. `
  + "What is shown is the last that came. If this stays and the kernel is idle, reload the page and run the cell again.";

class Pulse {
  constructor(model, places) {
    this.places = places;
    this.why = "";
    this.begin();
    model.on("comm_live_update", () => this.look());
  }
  // The page is looked at (again): what was not heard while it was away does not count.
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
      this.tell(GONE); // there is no connection that a greeting could go over
    }
    this.look();
  }
  get cut() {
    return [...this.places].some((place) => place.el.closest(".jupyter-widgets-disconnected"));
  }
  look() {
    clearTimeout(this.later);
    if (this.asked === null || this.why === GONE) return; // one that was only silent may turn out to be gone
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
