// One route of the API as a form: its body and parameters are edited and sent, and what comes back is
// shown as it comes.

import { askForKey, hasKey, keyHeaders } from "./access.js";
import { curlOf } from "./curl.js";
import { make, setText } from "./dom.js";
import { bytes, duration } from "./format.js";

// More of an answer is not shown: a page of many megabytes would stand still.
const MAX_SHOWN = 1_000_000;

export class Operation {
  #method;
  #path;
  #inputs = [];
  #body = null;
  #running = null;
  #go = make("button", { type: "submit", textContent: "Send" });
  #stop = make("button", { type: "button", className: "plain", textContent: "Stop", disabled: true });
  #copy = make("button", { type: "button", className: "plain", textContent: "Copy as curl" });
  #status = make("p", { className: "answer-status", attributes: { role: "status" } });
  #headers = make("dl", { className: "headers" });
  #headersBox = make("details", { hidden: true }, make("summary", { textContent: "Headers" }), this.#headers);
  #output = make("pre", { hidden: true, tabIndex: 0, attributes: { "aria-label": "The answer" } });
  #curl = make("pre", { className: "curl", hidden: true, tabIndex: 0, attributes: { "aria-label": "The request as a curl command" } });
  element;

  constructor(method, path, operation, samples) {
    [this.#method, this.#path] = [method.toUpperCase(), path];
    const content = operation.requestBody?.content["application/json"];
    const streams = "text/event-stream" in (operation.responses["200"].content ?? {});
    if (content) {
      this.#body = make("textarea", { value: samples.body(content.schema, streams), spellcheck: false });
      this.#body.rows = Math.min(24, this.#body.value.split("\n").length + 2);
    }
    this.#inputs = (operation.parameters ?? []).map(parameterInput);
    this.element = make("form", {},
      make("h3", {}, make("span", { className: "method", textContent: this.#method }), " ",
        make("span", { className: "mono", textContent: path })),
      make("p", { className: "quiet", textContent: operation.summary }),
      this.#body ? make("label", {}, "Body; Ctrl+Enter sends", this.#body) : null,
      ...this.#inputBars(),
      make("div", { className: "bar" }, this.#go, this.#stop, this.#copy), this.#curl,
      this.#status, this.#headersBox, this.#output);
    this.#listen();
  }

  #listen() {
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.element.requestSubmit();
    });
    this.#stop.addEventListener("click", () => this.#running?.abort());
    this.#copy.addEventListener("click", () => this.#copyCurl());
  }

  /** Nobody looks at it any more. */
  leave() {
    this.#running?.abort();
  }

  // Headers are rarely needed, so that they are folded away.
  #inputBars() {
    const bar = (found) => make("div", { className: "fields" }, ...found.map((each) => each.label));
    const headers = this.#inputs.filter((each) => each.where === "header");
    const others = this.#inputs.filter((each) => each.where !== "header");
    return [
      ...(others.length ? [bar(others)] : []),
      ...(headers.length ? [make("details", {}, make("summary", { textContent: "Request headers" }), bar(headers))] : []),
    ];
  }

  #request() {
    let path = this.#path;
    const query = new URLSearchParams();
    const headers = this.#body ? [["Content-Type", "application/json"]] : [];
    for (const { name, where, input } of this.#inputs) {
      const value = input.value.trim();
      if (where === "path") path = path.replace(`{${name}}`, value.split("/").map(encodeURIComponent).join("/"));
      else if (value && where === "query") query.set(name, value);
      else if (value) headers.push([name, value]);
    }
    const search = query.toString();
    // Relative: the router may stand below a path of its proxy.
    return { url: path.slice(1) + (search && `?${search}`) || ".", method: this.#method, headers,
      body: this.#body ? this.#body.value : null };
  }

  async #send() {
    if (this.#running) return;
    this.#running = new AbortController();
    [this.#go.disabled, this.#stop.disabled] = [true, false];
    [this.#output.textContent, this.#output.hidden, this.#headersBox.hidden] = ["", true, true];
    this.#say("waiting", "");
    const begun = performance.now();
    const passed = () => duration((performance.now() - begun) / 1000);
    try {
      await this.#exchange(passed);
    } catch (error) {
      this.#say(error.name === "AbortError" ? `stopped after ${passed()}` : String(error), "bad");
    }
    this.#running = null;
    [this.#go.disabled, this.#stop.disabled] = [false, true];
  }

  async #exchange(passed) {
    const { url, method, headers, body } = this.#request();
    const response = await fetch(url, { method, body, signal: this.#running.signal,
      headers: { ...Object.fromEntries(headers), ...keyHeaders() } });
    const kind = response.ok ? "good" : "bad";
    const line = `${response.status} ${response.statusText}`.trim();
    this.#say(`${line} · headers after ${passed()}`, kind);
    this.#showHeaders(response.headers);
    const received = await this.#showBody(response);
    this.#say(`${line} · ${passed()} · ${bytes(received)}`, kind);
    if (response.status === 401) askForKey("This route wants a key.");
  }

  #showHeaders(headers) {
    this.#headersBox.hidden = false;
    this.#headers.replaceChildren(...[...headers].map(([name, value]) =>
      make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  }

  async #showBody(response) {
    const output = this.#output;
    output.hidden = false;
    let received = 0;
    const decoder = new TextDecoder();
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      received += value.length;
      const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
      if (output.textContent.length < MAX_SHOWN) output.append(decoder.decode(value, { stream: true }));
      if (isAtEnd) output.scrollTop = output.scrollHeight;
    }
    if ((response.headers.get("Content-Type") ?? "").startsWith("application/json") && received < MAX_SHOWN) {
      setText(output, JSON.stringify(JSON.parse(output.textContent), null, 2));
    }
    if (received === 0) setText(output, "(no body)");
    return received;
  }

  #say(text, kind) {
    this.#status.dataset.kind = kind;
    setText(this.#status, text);
  }

  async #copyCurl() {
    const request = this.#request();
    const url = new URL(request.url, document.baseURI).href;
    const command = curlOf({ ...request, url, hasKey: hasKey() });
    this.#curl.hidden = false;
    setText(this.#curl, command);
    try {
      await navigator.clipboard.writeText(command);
      this.#say("copied", "");
    } catch {
      // Only secure pages may write there: what is selected can be copied by hand.
      this.#curl.focus();
      getSelection().selectAllChildren(this.#curl);
      this.#say("selected: copy it with Ctrl+C", "");
    }
  }
}

function parameterInput(parameter) {
  const { name, in: where, description = "" } = parameter;
  const input = make("input", { type: "text", spellcheck: false, autocomplete: "off", title: description });
  return { name, where, input, label: make("label", {}, `${name}${where === "path" ? " (in the path)" : ""}`, input) };
}
