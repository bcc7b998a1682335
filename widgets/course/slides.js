// Shows one slide at a time. Without this script the page is one long text.
const slides = [...document.querySelectorAll("main.slides > section > section")].filter(
  (slide) => slide.textContent.trim() || slide.querySelector("img, svg"));
const hidden = [...document.querySelectorAll("main.slides > section > section")].filter((s) => !slides.includes(s));
hidden.forEach((slide) => slide.remove());
let at = 0;

const steps = () => [...slides[at].querySelectorAll(".fragment")];

function show(number, all) {
  at = Math.max(0, Math.min(number, slides.length - 1));
  slides.forEach((slide, n) => slide.classList.toggle("now", n === at));
  if (all) steps().forEach((step) => step.classList.add("seen"));
  slides[at].scrollTop = 0;
  document.getElementById("place").textContent = `${at + 1} / ${slides.length}`;
  history.replaceState(null, "", `#${at + 1}`);
  draw();
}

function next() {
  const step = steps().find((one) => !one.classList.contains("seen"));
  if (!step) return at < slides.length - 1 && show(at + 1);
  step.classList.add("seen");
  step.scrollIntoView({ block: "nearest" });
}

function back() {
  const step = steps().filter((one) => one.classList.contains("seen")).pop();
  if (step) step.classList.remove("seen");
  else if (at > 0) show(at - 1, true);
}

async function draw() {
  const figures = [...slides[at].querySelectorAll(".figure:empty")];
  if (!figures.length) return;
  if (!window.Plotly) {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    if (!window.Plotly) new Function(text).call(window);
  }
  for (const figure of figures) {
    const { data, layout } = JSON.parse(figure.dataset.figure);
    if (layout.height) figure.style.height = `${layout.height}px`;
    await Plotly.newPlot(figure, data, layout, { responsive: true, displayModeBar: false });
  }
}

const code = () => document.body.classList.toggle("code");
const keys = { ArrowRight: next, PageDown: next, " ": next, ArrowLeft: back, PageUp: back, c: code,
  Home: () => show(0), End: () => show(slides.length - 1) };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
document.getElementById("next").onclick = next;
document.getElementById("back").onclick = back;
document.getElementById("code").onclick = code;
document.querySelectorAll("nav button").forEach((button) => button.addEventListener("click", () => button.blur()));
document.documentElement.classList.add("shown");
show((parseInt(location.hash.slice(1)) || 1) - 1);
