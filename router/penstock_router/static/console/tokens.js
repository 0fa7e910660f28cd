// An answer's tokens, each shaded by its probability; pointing at one, or focusing it, shows what
// might have stood there instead.

import { byId, make } from "./dom.js";
import { percent, visible } from "./format.js";

// Below each of these a token is a shade stronger.
const SHADES = [0.05, 0.2, 0.5, 0.8];

export function shadeOf(logprob) {
  const probability = Math.exp(logprob);
  const shade = SHADES.findIndex((bound) => probability < bound);
  return shade < 0 ? 0 : SHADES.length - shade;
}

/** What of a chunk to show as tokens: [text, entries]. Tokens that make no whole character by
 * themselves are shown as the text they make together. */
export function piecesOf(content, entries) {
  if (entries.map((entry) => entry.token).join("") === content) return entries.map((entry) => [entry.token, [entry]]);
  return content || entries.length ? [[content, entries]] : [];
}

/** The text of one answer; `addText` where there are no probabilities, `addTokens` where there are. */
export class AnswerText {
  element = make("div", { className: "text" });
  #entries = new WeakMap();
  #isReachable = false;

  addText(text) {
    if (this.element.lastChild?.nodeType === Node.TEXT_NODE) this.element.lastChild.appendData(text);
    else this.element.append(text);
  }

  addTokens(content, entries) {
    if (!this.#isReachable) this.#begin();
    for (const [text, found] of piecesOf(content, entries)) {
      const least = Math.min(...found.map((entry) => entry.logprob));
      const span = make("span", { className: `token shade-${shadeOf(least)}`, textContent: text,
        tabIndex: this.element.querySelector(".token") ? -1 : 0, attributes: { role: "option" } });
      this.#entries.set(span, found);
      this.element.append(span);
    }
  }

  #begin() {
    this.#isReachable = true;
    this.element.setAttribute("role", "listbox");
    this.element.setAttribute("aria-label", "Tokens of the answer: the arrow keys show alternatives");
    this.element.setAttribute("aria-orientation", "horizontal");
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("focusin", ({ target }) => this.#show(target));
    this.element.addEventListener("focusout", hideTip);
    this.element.addEventListener("pointerover", ({ target }) => this.#show(target));
    this.element.addEventListener("pointerleave", () => this.#show(document.activeElement));
  }

  #show(target) {
    const entries = this.#entries.get(target);
    if (entries) showTip(target, entries);
    else hideTip();
  }

  #onKey(event) {
    if (event.key === "Escape") return hideTip();
    const tokens = [...this.element.querySelectorAll(".token")];
    const place = tokens.indexOf(document.activeElement);
    const places = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tokens.length - 1 };
    if (place < 0 || !(event.key in places)) return undefined;
    event.preventDefault();
    const next = tokens[Math.min(tokens.length - 1, Math.max(0, places[event.key]))];
    tokens[place].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    return undefined;
  }
}

function showTip(target, entries) {
  const tip = byId("tip");
  tip.replaceChildren(...entries.map(table));
  tip.hidden = false;
  target.setAttribute("aria-describedby", "tip");
  place(tip, target.getClientRects()[0] ?? target.getBoundingClientRect());
}

export function hideTip() {
  byId("tip").hidden = true;
}

function table(entry) {
  const known = entry.top_logprobs.some((other) => other.token === entry.token && other.logprob === entry.logprob);
  const rows = known ? entry.top_logprobs : [...entry.top_logprobs, entry];
  return make("ol", {}, ...rows.map((row) => alternative(row, row.token === entry.token && row.logprob === entry.logprob)));
}

function alternative({ token, logprob, bytes }, isChosen) {
  const probability = Math.exp(logprob);
  const fill = make("span", { className: "fill" });
  fill.style.width = `${(100 * probability).toFixed(1)}%`;
  return make("li", { className: isChosen ? "chosen" : "" },
    make("span", { className: "mono", textContent: visible(token, bytes) }),
    make("span", { className: "meter", attributes: { "aria-hidden": "true" } }, fill),
    make("span", { className: "value", textContent: percent(probability) }),
    isChosen ? make("span", { className: "hidden", textContent: "chosen" }) : null);
}

// Above the token, so that what follows stays in sight, or below it where there is no room; never
// beyond the window's edges.
function place(tip, at) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const above = at.top - height - 6;
  tip.style.top = `${above >= 8 ? above : at.bottom + 6}px`;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
}
