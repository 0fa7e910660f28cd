// One answer in the conversation: its reasoning, text and calls as they come, and below them what it
// took: times, tokens, how it ended, and at which shards it was made, which the feed tells.

import { Calls, Reasoning } from "./asides.js";
import { colourOf } from "./colours.js";
import { make } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { movesOf } from "./segments.js";
import { AnswerText } from "./tokens.js";

export class Answer {
  /** What was said so far: of the next request it is a message. */
  content = "";
  #text = new AnswerText();
  #reasoning = new Reasoning();
  #calls = new Calls();
  // What came last was no text: nor are tokens that nothing is shown of.
  #isAside = false;
  #facts = make("span", { className: "facts", textContent: "waiting" });
  #shards = make("span", { className: "places" });
  #error = make("p", { className: "error", hidden: true, attributes: { role: "alert" } });
  #begunMs = performance.now();
  #firstMs = null;
  #lastMs = null;
  #tokens = 0;
  #usage = null;
  #finish = "";
  element;

  constructor(requestId) {
    this.requestId = requestId;
    this.element = make("article", { className: "message assistant", data: { request: requestId, state: "running" } },
      make("h4", { textContent: "Assistant" }), this.#reasoning.element, this.#text.element,
      this.#calls.element, this.#error,
      make("p", { className: "meta" }, this.#shards, this.#facts));
  }

  /** A chunk of a chat's stream. */
  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const [choice] = chunk.choices ?? [];
    if (choice) this.#takeChoice(choice);
    this.#showFacts();
  }

  #takeChoice(choice) {
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    const entries = choice.logprobs?.content ?? [];
    if (content || reasoning || calls || entries.length) {
      this.#lastMs = performance.now();
      this.#firstMs ??= this.#lastMs;
      this.#tokens += entries.length || 1;
      if (reasoning) this.#reasoning.add(reasoning);
      if (content || calls) this.#reasoning.end();
      this.#isAside = content ? false : this.#isAside || Boolean(reasoning || calls);
      if (!this.#isAside) this.#addText(content ?? "", entries);
      if (calls) this.#calls.add(calls);
    }
    if (choice.finish_reason) this.#finish = choice.finish_reason;
  }

  #addText(content, entries) {
    this.content += content;
    if (entries.length) this.#text.addTokens(content, entries);
    else this.#text.addText(content);
  }

  /** It is over: done, stopped, or failed with the server's words. */
  end(state, words = "") {
    this.element.dataset.state = state;
    if (state === "stopped") this.#finish = "stopped";
    if (words) {
      this.#error.textContent = words;
      this.#error.hidden = false;
      this.#finish = "failed";
    }
    this.#showFacts();
  }

  #showFacts() {
    const facts = [];
    if (this.#firstMs !== null) facts.push(`first token ${duration((this.#firstMs - this.#begunMs) / 1000)}`);
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    if (this.#tokens > 1 && seconds > 0) facts.push(`${rate((this.#made - 1) / seconds)} tokens/s`);
    if (this.#usage) facts.push(`${count(this.#usage.prompt_tokens)} tokens in, ${count(this.#usage.completion_tokens)} out`);
    else if (this.#tokens) facts.push(`${count(this.#tokens)} tokens`);
    if (this.#finish) facts.push(this.#finish);
    this.#facts.textContent = facts.join(" · ") || "waiting";
  }

  // An event may bundle several tokens; the count at the end is exact.
  get #made() {
    return this.#usage?.completion_tokens ?? this.#tokens;
  }

  /** What the feed says of its request. */
  showRecord(record) {
    const moves = movesOf(record);
    const [first] = record.attempts;
    if (!first) return;
    this.element.dataset.moves = String(moves.length);
    const parts = [place(first.shard)];
    for (const { to, why } of moves) {
      parts.push(make("span", { className: "moved", textContent: `↷ went on (${why})` }), place(to));
    }
    this.#shards.replaceChildren(...parts);
  }
}

function place(address) {
  return make("span", { className: `place ${colourOf(address)}` },
    make("span", { className: "swatch" }), make("span", { className: "mono", textContent: address }));
}
