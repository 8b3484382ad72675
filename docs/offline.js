// A page of the file system may start no worker: the search's script then runs in a hidden frame beside it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.srcdoc =
        "<script>self.postMessage = (data) => frameElement.answer(data)</script>" + `<script src="${url}"></script>`;
      this.ready = new Promise((done) => (frame.onload = () => done(frame.contentWindow)));
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((self) => self.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
