// Shows a recorded run without a kernel: answers the page from the data in a file (see widgets/export/report.py).
// Follows board.js in one script.

const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const unzipped = async (text) =>
  (await new Response(new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).json());

// told: the file's data of the run; plotly: returns plotly.js, compressed bytes, when a chart is to be drawn.
async function replay(el, told, plotly) {
  const kept = await unzipped(told), hearers = new Set(), open = new Set();
  let number = 0, held = null; // the requested stretch of steps; none: the last
  const say = (content, ...buffers) => [...hearers].forEach((hear) => hear({ ...content, number: ++number }, buffers));
  const tell = ([content, buffer]) => say(content, ...(buffer === null ? [] : [bytes(buffer)]));
  const table = (view) => say({ kind: "tables", tables: { [view]: held?.tables[view] ?? kept.tables[view] } });
  const answers = {
    hello: () => tell(kept.open), // any answer shows that the kernel is there
    here: () => say({ kind: "alive" }),
    plotly: async () => say({ kind: "plotly" }, await plotly()),
    table: (said) => {
      open[said.open ? "add" : "delete"](said.view);
      if (said.open) table(said.view);
    },
    ask: ({ view, request: { at } }) => {
      if (at === undefined || !kept.windows.length) return;
      held = kept.windows.reduce((a, b) => (Math.abs(b.first - at) < Math.abs(a.first - at) ? b : a));
      tell(held.message);
      if (open.has(view)) table(view);
    },
  };
  const model = {
    on: (_, hear) => hearers.add(hear),
    off: (_, hear) => hearers.delete(hear),
    send: (message) => queueMicrotask(() => answers[message.kind]?.(message)),
  };
  el.classList.add("wb-kept");
  const made = board();
  made.initialize({ model });
  made.render({ el });
}
