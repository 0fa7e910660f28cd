// What an answer has beside its text: reasoning, which can be folded away, and calls of tools.

import { make } from "./dom.js";

/** Open while it is all there is; folded once, when the answer begins. */
export class Reasoning {
  #text = make("div", { className: "thoughts" });
  element = make("details", { className: "reasoning", hidden: true, open: true },
    make("summary", { textContent: "Reasoning" }), this.#text);
  #isOver = false;

  add(text) {
    this.element.hidden = false;
    this.#text.append(text);
    this.#text.normalize();
  }

  end() {
    if (this.#isOver) return;
    this.#isOver = true;
    this.element.open = false;
  }
}

/** Calls, each with its name and its arguments as they come. */
export class Calls {
  element = make("div", { className: "calls", hidden: true });
  #arguments = new Map();

  /** Of a chunk: [{index, function: {name, arguments}}]. */
  add(gained) {
    this.element.hidden = false;
    for (const { index, function: { name = "", arguments: text = "" } } of gained) {
      if (!this.#arguments.has(index)) this.#arguments.set(index, this.#begin(name));
      this.#arguments.get(index).append(text);
    }
  }

  #begin(name) {
    const shown = make("span", { className: "arguments" });
    this.element.append(make("p", { className: "call mono" },
      make("span", { className: "hidden", textContent: "Calls " }),
      make("strong", { textContent: name }), " ", shown));
    return shown;
  }
}
