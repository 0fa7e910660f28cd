// Server-sent events from the body of a fetch: EventSource can show no key.

/** Takes text in any pieces and gives whole events: {event, data, id}. */
export class EventParser {
  #rest = "";
  #event = "";
  #data = [];
  #id = "";

  feed(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.map((line) => this.#take(line)).filter((event) => event !== null);
  }

  #take(line) {
    if (line === "") return this.#finish();
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id") this.#id = value;
    return null;
  }

  #finish() {
    const found = { event: this.#event || "message", data: this.#data.join("\n"), id: this.#id };
    const isEvent = this.#data.length > 0;
    [this.#event, this.#data] = ["", []];
    return isEvent ? found : null;
  }
}

/** The events of a response, as they come. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What a refusal says, in the server's words: each API has its own form. */
export async function refusalOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const words = body.error?.message ?? body.error ?? body.message;
    if (typeof words === "string") return words;
  } catch {
    // Not JSON: as it stands.
  }
  return text.slice(0, 2000) || `status ${response.status}`;
}
