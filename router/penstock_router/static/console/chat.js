// The playground: a conversation with the model, streamed; stopped, or asked for again.

import { askForKey, keyHeaders, onKeyChange } from "./access.js";
import { Answer } from "./answer.js";
import { Attachments, contentOf, picture } from "./attachments.js";
import { bodyFor, drawSettings, learnModels, whyNoImages } from "./chat_settings.js";
import { announce, byId, make } from "./dom.js";
import { eventsOf, refusalOf } from "./sse.js";
import { hideTip } from "./tokens.js";

const NARROW = "(max-width: 52rem)";

class Chat {
  /** [{role, content}], as the next request says them. */
  #messages = [];
  #answer = null;
  #running = null;
  #conversation = byId("conversation");
  #attachments = new Attachments(whyNoImages);

  constructor(feed) {
    drawSettings(() => this.#attachments.show());
    byId("settings-box").open = !matchMedia(NARROW).matches;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#say();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#say();
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("again").addEventListener("click", () => this.#regenerate());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    this.#conversation.addEventListener("scroll", hideTip);
    feed.addEventListener("requests", ({ detail }) => this.#showRecords(detail));
    document.addEventListener("view", ({ detail }) => this.#onView(detail));
    onKeyChange(() => learnModels().catch(() => {}));
    this.#showEmpty();
  }

  #onView(view) {
    hideTip();
    // What cannot be had now is asked for the next time.
    if (view === "chat") learnModels().catch(() => {});
  }

  #say() {
    const prompt = byId("prompt");
    const text = prompt.value;
    const hasText = text.trim() !== "";
    if (this.#running || (!hasText && this.#attachments.isEmpty)) return;
    prompt.value = "";
    const images = this.#attachments.take();
    if (!this.#messages.length) this.#conversation.replaceChildren();
    this.#messages.push({ role: "user", content: contentOf(text, images) });
    this.#conversation.append(make("article", { className: "message user" },
      make("h4", { textContent: "You" }),
      images.length ? make("div", { className: "pictures" }, ...images.map(picture)) : null,
      hasText ? make("div", { className: "text", textContent: text }) : null));
    this.#answerTo();
  }

  #regenerate() {
    if (this.#running || !this.#answer) return;
    this.#answer.element.remove();
    if (this.#messages.at(-1)?.role === "assistant") this.#messages.pop();
    this.#answerTo();
  }

  async #answerTo() {
    const answer = new Answer(`console-${randomName()}`);
    this.#answer = answer;
    this.#conversation.append(answer.element);
    this.#toEnd(true);
    this.#running = new AbortController();
    this.#showButtons();
    try {
      await this.#stream(answer, this.#running.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.end("failed", error instanceof Refusal ? error.message : `The router cannot be reached: ${error.message}`);
    }
    this.#running = null;
    // It may have been cleared away meanwhile.
    if (answer.content && answer === this.#answer) this.#messages.push({ role: "assistant", content: answer.content });
    announce(`The answer is ${answer.element.dataset.state}`);
    this.#showButtons();
    this.#toEnd();
  }

  async #stream(answer, signal) {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal,
      headers: { "Content-Type": "application/json", "X-Request-Id": answer.requestId, ...keyHeaders() },
      body: JSON.stringify(bodyFor(this.#messages)),
    });
    if (!response.ok) {
      const words = await refusalOf(response);
      if (response.status === 401) askForKey(words);
      throw new Refusal(words);
    }
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") return answer.end("done");
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(chunk.error.message ?? JSON.stringify(chunk.error));
      const isAtEnd = this.#isAtEnd();
      answer.take(chunk);
      if (isAtEnd) this.#toEnd(true);
    }
    throw new Refusal("the stream ended early: the router is gone");
  }

  #showRecords(records) {
    for (const record of records) {
      if (record.id === this.#answer?.requestId) this.#answer.showRecord(record);
    }
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#answer = null;
    this.#attachments.take();
    this.#showEmpty();
    this.#showButtons();
    byId("prompt").focus();
  }

  #showEmpty() {
    this.#conversation.replaceChildren(make("p", { className: "empty",
      textContent: "A chat with the model. Each token is shaded by how likely it was: the stronger, the less. Point at one, or walk over them with the arrow keys, to see what else might have stood there." }));
  }

  #showButtons() {
    const isRunning = this.#running !== null;
    byId("send").disabled = isRunning;
    byId("stop").disabled = !isRunning;
    byId("again").disabled = isRunning || this.#answer === null;
  }

  #isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.#conversation;
    return scrollTop + clientHeight >= scrollHeight - 24;
  }

  #toEnd(always = false) {
    if (always || this.#isAtEnd()) this.#conversation.scrollTop = this.#conversation.scrollHeight;
  }
}

/** The server said no, or stopped in the middle: with its words. */
class Refusal extends Error {}

// crypto.randomUUID exists on secure pages only, and a router on a network has no certificate.
function randomName() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function startChat(feed) {
  return new Chat(feed);
}
