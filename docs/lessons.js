// On the site: each `.wb-replay` shows the run whose file it names, in the page's colours. No module, for a page that is
// opened from disk may load none. Follows replay.js in one script.

// Undoes `packed` of lessons.py.
const unpacked = (text) => {
  const out = new Uint8Array((text.length * 7) >> 3);
  for (let i = 0, at = 0, held = 0, bits = 0; i < text.length; i++) {
    [held, bits] = [((held << 7) | (text.charCodeAt(i) & 127)) & 0x7fff, bits + 7];
    if (bits >= 8) out[at++] = held >> (bits -= 8);
  }
  return new DataView(out.buffer);
};

const root = document.documentElement;
const loads = {};
const load = (src) => (loads[src] ??= new Promise((done, fail) => {
  const script = element("script", { src });
  script.onload = done;
  script.onerror = () => fail(new Error(`${src} did not come`));
  document.head.append(script);
}));
const paint = () => { document.body.dataset.jpThemeLight = String(root.dataset.theme !== "dark"); };
new MutationObserver(paint).observe(root, { attributeFilter: ["data-theme"] });
paint();
document.head.append(element("style", { textContent: CSS }));

// Two megabytes of plotly.js are loaded only by who comes near the run.
const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    const { run, plotly } = target.dataset;
    target.textContent = "The run is loaded.";
    load(run).then(() => {
      target.replaceChildren();
      return replay(target, window.wbRuns[run.split("/").at(-1)], () => load(plotly).then(() => unpacked(window.wbPlotly)));
    }).catch((error) => (target.textContent = `The run cannot be shown: ${error.message}`));
  }
}, { rootMargin: "1000px" });
for (const el of document.querySelectorAll(".wb-replay")) near.observe(el);
