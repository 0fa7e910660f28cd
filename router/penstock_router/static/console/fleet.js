// The fleet: this router's figures, and a card for each shard.

import { colourOf } from "./colours.js";
import { announce, byId, make, makeSvg, setAttributes, setText } from "./dom.js";
import { count, duration, rate } from "./format.js";

// A point a second.
const HISTORY = 60;
const STATE_MARKS = { serving: "●", loading: "◐", draining: "◑", gone: "✕" };

/** A line of the last values: as high as its largest one. */
class Sparkline {
  #values = [];
  #line = makeSvg("polyline", { class: "line" });
  element = makeSvg("svg", {
    class: "spark", viewBox: `0 0 ${HISTORY - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true",
  });

  constructor() {
    this.element.append(this.#line);
  }

  add(value) {
    this.#values = [...this.#values, value ?? 0].slice(-HISTORY);
    const top = Math.max(...this.#values) * 1.1 || 1;
    const start = HISTORY - this.#values.length;
    const points = this.#values.map((one, index) => `${start + index},${(19 - 18 * one / top).toFixed(1)}`);
    setAttributes(this.#line, { points: points.join(" ") });
  }
}

/** A share as a bar, with words beside it. */
class Meter {
  #fill = make("span", { className: "fill" });
  #bar;
  #value = make("span", { className: "value" });
  element;

  constructor(name) {
    this.#bar = make("span", { className: "meter", attributes: {
      role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "1" } }, this.#fill);
    this.element = make("div", { className: "row" }, make("span", { className: "name", textContent: name }),
      this.#bar, this.#value);
  }

  /** `level`: "", high or full, where being full is a trouble. */
  show(share, text, spoken, level = "") {
    const shown = Math.min(1, Math.max(0, share));
    this.#fill.style.width = `${(100 * shown).toFixed(1)}%`;
    this.#bar.dataset.level = level;
    setAttributes(this.#bar, { "aria-valuenow": shown.toFixed(3), "aria-valuetext": spoken });
    setText(this.#value, text);
  }
}

/** A value and its history. */
class Trend {
  #spark = new Sparkline();
  #value = make("span", { className: "value" });
  element;

  constructor(name) {
    this.element = make("div", { className: "row" }, make("span", { className: "name", textContent: name }),
      this.#spark.element, this.#value);
  }

  show(value, text, isTick) {
    setText(this.#value, text);
    if (isTick) this.#spark.add(value);
  }
}

// Near its end sequences are put down to make room.
function levelOf(used) {
  if (used > 0.97) return "full";
  return used > 0.85 ? "high" : "";
}

class ShardCard {
  #state = make("span", { className: "state" });
  #about = make("p", { className: "about" });
  #problem = make("p", { className: "problem" });
  #batch = new Meter("Batch");
  #cache = new Meter("KV cache");
  #queue = make("span", { className: "value" });
  #step = new Trend("Step");
  #rate = new Trend("Rate");
  #last = "";
  #known = {};
  element;

  constructor(address) {
    const queue = make("div", { className: "row" }, make("span", { className: "name", textContent: "Queue" }),
      make("span"), this.#queue);
    this.element = make("li", { className: `shard ${colourOf(address)}`, data: { address } },
      make("div", { className: "shard-head" }, make("span", { className: "swatch" }),
        make("span", { className: "address", textContent: address }), this.#state),
      this.#about, this.#problem,
      make("div", { className: "rows" }, this.#batch.element, this.#cache.element, queue,
        this.#step.element, this.#rate.element));
  }

  show(shard, isTick) {
    this.#showState(shard);
    // One that is gone keeps its name: nobody tells it any more.
    if (shard.model) this.#known = shard;
    const { model, device, dtype } = this.#known;
    const facts = [model, device, dtype].filter((fact) => fact && fact !== "none");
    setText(this.#about, facts.join(" · ") || "not known yet");
    setText(this.#problem, shard.state === "serving" ? "" : shard.problem);
    const most = shard.max_num_seqs || 0;
    this.#batch.show(most ? shard.running / most : 0, `${shard.running} / ${most || "–"}`,
      `${shard.running} of ${most} sequences`);
    const used = shard.kv_blocks ? shard.kv_used_blocks / shard.kv_blocks : 0;
    this.#cache.show(used, `${Math.round(100 * used)} %`,
      `${count(shard.kv_used_blocks)} of ${count(shard.kv_blocks)} blocks`, levelOf(used));
    const tokens = shard.queued_prompt_tokens ? `, ${count(shard.queued_prompt_tokens)} tokens` : "";
    const preempted = shard.preemptions_total ? ` · ${count(shard.preemptions_total)} preemptions` : "";
    setText(this.#queue, `${count(shard.waiting)} waiting${tokens}${preempted}`);
    this.#step.show(shard.step_s, duration(shard.step_s), isTick);
    this.#rate.show(shard.steps_per_s, shard.steps_per_s === null ? "–" : `${rate(shard.steps_per_s)} steps/s`, isTick);
  }

  #showState({ address, state, problem }) {
    if (state === this.#last) return;
    if (this.#last) announce(`Shard ${address} is ${state}${problem ? `: ${problem}` : ""}`);
    this.#last = state;
    this.element.dataset.state = state;
    setText(this.#state, `${STATE_MARKS[state] ?? ""} ${state}`);
  }
}

class Figures {
  #values = new Map();

  show(list, figures) {
    for (const [name, value, help] of figures) {
      if (!this.#values.has(name)) {
        const shown = make("dd");
        list.append(make("div", { title: help }, make("dt", { textContent: name }), shown));
        this.#values.set(name, shown);
      }
      setText(this.#values.get(name), value);
    }
  }
}

export function startFleet(feed) {
  const cards = new Map();
  const figures = new Figures();
  const list = byId("shards");
  let lastTick = 0;

  feed.addEventListener("fleet", ({ detail: fleet }) => {
    const isTick = fleet.now - lastTick >= 0.95;
    if (isTick) lastTick = fleet.now;
    showCards(fleet.shards, isTick);
    const serving = fleet.shards.filter((shard) => shard.state === "serving").length;
    const { in_flight, queued, loop_lag_worst_s } = fleet.router;
    figures.show(byId("figures"), [
      ["Shards serving", `${serving} of ${fleet.shards.length}`, "Shards that take requests"],
      ["In flight", count(in_flight), "Sequences that have a place"],
      ["Queued", count(queued), "Sequences that are prepared or wait for a place"],
      ["Tokens", `${rate(feed.tokensPerSecond())} /s`, "Of the requests below, over three seconds"],
      ["Loop lag", duration(loop_lag_worst_s), "The worst of ten seconds: how late the event loop came to a timer"],
    ]);
    setText(byId("shards-note"), fleet.workers > 1
      ? `as worker ${fleet.worker + 1} of ${fleet.workers} sees them; in flight, queue and requests are that worker's`
      : "");
  });

  function showCards(shards, isTick) {
    for (const shard of shards) {
      if (!cards.has(shard.address)) {
        cards.set(shard.address, new ShardCard(shard.address));
        list.append(cards.get(shard.address).element);
      }
      cards.get(shard.address).show(shard, isTick);
    }
    const there = new Set(shards.map((shard) => shard.address));
    for (const [address, card] of cards) {
      if (there.has(address)) continue;
      card.element.remove();
      cards.delete(address);
      announce(`Shard ${address} left the fleet`);
    }
  }
}
