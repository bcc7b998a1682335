// Lets the page half of a widget receive its kernel's messages. Precedes each page half in one module.

// [Note: Deaf models] anywidget hands a model no message before the widget's module is loaded. If loading takes over 2 s,
// as on a busy machine, the model never gets one: the page can send, but what the kernel sends is lost.
// An empty message shows whether this has happened. Then the model takes its messages as ipywidgets' own models do,
// and asks for its state, because it may have missed a part.
function hearing({ model }) {
  const whole = model.set?.({}); // Backbone's `set` returns the model behind anywidget's proxy
  if (!whole?.comm) return;
  const deaf = whole._handle_comm_msg;
  deaf.call(whole, { content: { data: {} } }).catch(() => {
    let kind = whole;
    while (kind._handle_comm_msg === deaf) kind = Object.getPrototypeOf(kind);
    whole.comm.on_msg((message) => kind._handle_comm_msg.call(whole, message));
    whole.comm.send({ method: "request_state" }, {});
  });
}
