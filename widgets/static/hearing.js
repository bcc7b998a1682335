// Lets the page half of a widget hear its kernel. Goes before each of them in one module.

// [Note: Deaf models] anywidget hands a model no message before the widget's module is there, and where that took more than
// 2 s, as on a page that loads on a busy machine, none ever after: what the page says goes out, what the kernel says is lost.
// A message without meaning tells whether that has come to pass. Then the model takes its messages as ipywidgets' own models
// do, and asks for its state, of which it may have missed something.
function hearing({ model }) {
  const whole = model.set?.({}); // Backbone's `set` returns the model that anywidget's proxy stands for
  if (!whole?.comm) return;
  const deaf = whole._handle_comm_msg;
  deaf.call(whole, { content: { data: {} } }).catch(() => {
    let kind = whole;
    while (kind._handle_comm_msg === deaf) kind = Object.getPrototypeOf(kind);
    whole.comm.on_msg((message) => kind._handle_comm_msg.call(whole, message));
    whole.comm.send({ method: "request_state" }, {});
  });
}
