// The live feed: one connection, taken up again by itself, and what is known from it.
//
// Tells, as DOM events: "state" (connecting, live, lost, refused), "fleet" (a report of all shards)
// and "requests" (records that are new or have changed).

import { eventsOf, refusalOf } from "./sse.js";

const RETRY_MS = [500, 1000, 2000, 4000];
// The router says something every second.
const SILENCE_MS = 5000;
const MAX_REQUESTS = 400;
// Over so long a rate of tokens is taken.
const RATE_MS = 3000;

/** What tells a record from all others. Clients choose ids, and may choose one twice. */
export function keyOf(record) {
  return `${record.id}@${record.arrived_at}`;
}

export class Feed extends EventTarget {
  state = "connecting";
  /** Why it is lost or refused, in words. */
  reason = "";
  fleet = null;
  /** By `keyOf`, in the order of their arrival here. */
  requests = new Map();
  #headers;
  #url;
  #failures = 0;
  #connection = null;
  #timer = 0;
  #clockOffset = null;
  #tokens = [];
  // No requests came by this connection yet.
  #isFirst = true;

  constructor(url, headers) {
    super();
    this.#url = url;
    this.#headers = headers;
  }

  /** Connect, now: also where it waits to try again. */
  connect() {
    clearTimeout(this.#timer);
    this.#connection?.abort();
    this.#connection = new AbortController();
    this.#run(this.#connection);
  }

  /** The router's clock, in unix seconds. */
  now() {
    return Date.now() / 1000 + (this.#clockOffset ?? 0);
  }

  /** Tokens a second of the requests that are followed, over the last few seconds. */
  tokensPerSecond() {
    const since = performance.now() - RATE_MS;
    this.#tokens = this.#tokens.filter(([at]) => at >= since);
    return this.#tokens.reduce((sum, [, tokens]) => sum + tokens, 0) / (RATE_MS / 1000);
  }

  async #run(connection) {
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => connection.abort(), SILENCE_MS);
    };
    heard();
    try {
      const response = await fetch(this.#url, {
        headers: this.#headers(), signal: connection.signal, cache: "no-store",
      });
      if (!response.ok) return await this.#refused(response);
      this.#isFirst = true;
      for await (const event of eventsOf(response)) {
        heard();
        this.#take(event);
      }
      this.#lost("the router ended it", connection);
    } catch (error) {
      const silent = error.name === "AbortError";
      this.#lost(silent ? "the router is silent" : "the router cannot be reached", connection);
    } finally {
      clearTimeout(silence);
    }
  }

  #take({ event, data }) {
    const body = JSON.parse(data);
    if (event === "fleet") this.#takeFleet(body);
    if (event === "requests") this.#takeRequests(body);
  }

  #takeFleet(fleet) {
    const offset = fleet.now - Date.now() / 1000;
    this.#clockOffset ??= offset;
    // It wanders with what the network takes; a step of the clock is followed at once.
    const near = Math.abs(offset - this.#clockOffset) < 2;
    this.#clockOffset = near ? 0.9 * this.#clockOffset + 0.1 * offset : offset;
    this.fleet = fleet;
    this.#failures = 0;
    this.#become("live", "");
    this.dispatchEvent(new CustomEvent("fleet", { detail: fleet }));
  }

  #takeRequests(records) {
    if (this.#isFirst) this.#forgetUnknown(records);
    this.#isFirst = false;
    for (const record of records) {
      const key = keyOf(record);
      const before = this.requests.get(key);
      const tokens = record.output_tokens - (before?.output_tokens ?? 0);
      if (before && tokens > 0) this.#tokens.push([performance.now(), tokens]);
      this.requests.set(key, record);
    }
    this.#forgetOldest();
    this.dispatchEvent(new CustomEvent("requests", { detail: records }));
  }

  // A connection begins with all that its router knows. What ran and is not in it ended unseen, or
  // with its router, or is another worker's: nobody will tell its end.
  #forgetUnknown(records) {
    const known = new Set(records.map(keyOf));
    for (const [key, record] of this.requests) {
      if (record.ended_at === null && !known.has(key)) this.requests.delete(key);
    }
  }

  #forgetOldest() {
    for (const [key, record] of this.requests) {
      if (this.requests.size <= MAX_REQUESTS) return;
      if (record.ended_at !== null) this.requests.delete(key);
    }
  }

  async #refused(response) {
    const words = await refusalOf(response);
    if (response.status === 401 || response.status === 403) this.#become("refused", words);
    else this.#lost(words, this.#connection);
  }

  #lost(reason, connection) {
    if (connection !== this.#connection) return;
    this.#become("lost", reason);
    const delay = RETRY_MS[Math.min(this.#failures, RETRY_MS.length - 1)];
    this.#failures += 1;
    this.#timer = setTimeout(() => this.connect(), delay);
  }

  #become(state, reason) {
    if (state === this.state && reason === this.reason) return;
    [this.state, this.reason] = [state, reason];
    this.dispatchEvent(new Event("state"));
  }
}
