// The search of the theme runs in a worker, which browsers refuse to pages that are opened as files. There a hidden
// frame takes its place: it loads the same script and passes messages on.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...scripts) => Promise.all(scripts.map(script => this.load(script)));
      this.ready = this.load(address);
    }
    load(address) {
      const script = this.inside.document.createElement("script");
      script.src = address;
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
