// The API's routes, from the document that the router serves: one is chosen, and its form is shown.

import { keyHeaders } from "./access.js";
import { byId, make } from "./dom.js";
import { Operation } from "./operation.js";
import { Samples } from "./samples.js";

class Explorer {
  #buttons = [];
  #shown = null;
  #document = null;
  #model = "";

  constructor() {
    byId("route-filter").addEventListener("input", () => this.#filter());
    document.addEventListener("view", ({ detail }) => detail === "api" && this.#load());
  }

  async #load() {
    if (this.#document) return;
    try {
      const answer = await fetch("openapi.json");
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      this.#document = await answer.json();
      await this.#learnModel();
      this.#draw();
    } catch (error) {
      this.#document = null;
      byId("operation").replaceChildren(make("p", { className: "error", textContent: `openapi.json cannot be had: ${error.message}` }));
    }
  }

  async #learnModel() {
    const answer = await fetch("v1/models", { headers: keyHeaders() });
    if (answer.ok) this.#model = (await answer.json()).data[0].id;
  }

  #draw() {
    const routes = Object.entries(this.#document.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
    this.#buttons = routes.map((route) => {
      const button = make("button", { type: "button", className: "route", title: route.operation.summary },
        make("span", { className: "method", textContent: route.method.toUpperCase() }),
        make("span", { className: "mono", textContent: route.path }));
      button.addEventListener("click", () => this.#choose(route, button));
      return button;
    });
    byId("routes").replaceChildren(...this.#buttons.map((button) => make("li", {}, button)));
    const first = routes.findIndex((route) => route.path === "/v1/chat/completions");
    this.#choose(routes[Math.max(0, first)], this.#buttons[Math.max(0, first)]);
  }

  #choose({ path, method, operation }, button) {
    for (const other of this.#buttons) other.removeAttribute("aria-current");
    button.setAttribute("aria-current", "true");
    this.#shown?.leave();
    this.#shown = new Operation(method, path, operation, new Samples(this.#document, this.#model));
    byId("operation").replaceChildren(this.#shown.element);
  }

  #filter() {
    const wanted = byId("route-filter").value.trim().toLowerCase();
    for (const button of this.#buttons) {
      button.parentElement.hidden = !`${button.textContent} ${button.title}`.toLowerCase().includes(wanted);
    }
  }
}

export function startExplorer() {
  return new Explorer();
}
