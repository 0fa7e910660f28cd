// Requests as bars on a time line that scrolls: the newest on top, now at the right edge.
//
// A lane's unit is the second: its viewBox says which part of time it shows, so that a bar is drawn
// once and moved by changing that alone. Nothing is drawn while nobody sees it.

import { colourOf } from "./colours.js";
import { announce, byId, make, makeSvg, setAttributes, setText } from "./dom.js";
import { keyOf } from "./feed.js";
import { duration, words } from "./format.js";
import { describe, showDetails } from "./request_details.js";
import { isWanted, movesOf, segmentsOf, stateOf } from "./segments.js";

const FRAME_MS = 100;
const REDUCED_FRAME_MS = 1000;
// About a lane's width: there is nothing to draw before a bar has moved by a pixel.
const LANE_PIXELS = 700;
// Coordinates are seconds since this: whole unix seconds are too long for a drawing's numbers.
const EPOCH = Math.floor(Date.now() / 1000);
const HEIGHT = 20;
const TOPS = { queued: 8, gap: 8, retained: 9, prefill: 3, tokens: 3 };

/** One request's row. */
class Row {
  #who = make("span", { className: "who" });
  #how = make("span", { className: "how" });
  #bars = makeSvg("g");
  #marks = makeSvg("g");
  #lane = makeSvg("svg", { class: "lane", preserveAspectRatio: "none", "aria-hidden": "true" });
  element;
  record;

  constructor(number) {
    this.#lane.append(this.#bars, this.#marks);
    this.element = make("li", { className: "request", id: `request-${number}`, tabIndex: -1,
      attributes: { role: "option", "aria-selected": "false" } }, this.#who, this.#lane, this.#how);
  }

  show(record, now) {
    this.record = record;
    const moves = movesOf(record);
    const state = stateOf(record);
    this.element.dataset.state = state;
    this.element.dataset.id = record.id;
    this.element.dataset.moves = String(moves.length);
    setText(this.#who, shortName(record));
    setText(this.#how, moves.length ? `↷ ${outcome(record)}` : outcome(record));
    setAttributes(this.element, { "aria-label": describe(record, now) });
    this.#drawMarks(record, moves, state);
    this.stretch(now);
  }

  /** Draw the bar up to now: of one that runs it grows. */
  stretch(now) {
    const parts = segmentsOf(this.record, now);
    while (this.#bars.childElementCount > parts.length) this.#bars.lastElementChild.remove();
    while (this.#bars.childElementCount < parts.length) this.#bars.append(makeSvg("rect"));
    parts.forEach(({ kind, from, to, shard }, index) => {
      const top = TOPS[kind];
      setAttributes(this.#bars.children[index], {
        class: `part ${kind} ${shard ? colourOf(shard) : ""}`.trim(),
        x: (from - EPOCH).toFixed(3), width: (to - from).toFixed(3), y: top, height: HEIGHT - 2 * top,
      });
    });
  }

  // Lines whose width no stretching changes; a dot is a line without length.
  #drawMarks(record, moves, state) {
    const wanted = moves.map((move) => ["move", move.at]);
    if (state === "bad") wanted.push(["end-bad", record.ended_at]);
    if (state === "cut") wanted.push(["end-cut", record.ended_at]);
    while (this.#marks.childElementCount > 2 * wanted.length) this.#marks.lastElementChild.remove();
    while (this.#marks.childElementCount < 2 * wanted.length) this.#marks.append(makeSvg("line"));
    wanted.forEach(([kind, at], index) => {
      const x = (at - EPOCH).toFixed(3);
      setAttributes(this.#marks.children[2 * index], { class: `mark ${kind}`, x1: x, x2: x, y1: 1, y2: HEIGHT - 1 });
      setAttributes(this.#marks.children[2 * index + 1], { class: `dot ${kind}`, x1: x, x2: x, y1: HEIGHT / 2, y2: HEIGHT / 2 });
    });
  }

  scroll(now, span) {
    this.#lane.setAttribute("viewBox", `${(now - span - EPOCH).toFixed(3)} 0 ${span} ${HEIGHT}`);
  }
}

// The ids that servers make are one prefix and much hexadecimal: the end tells them apart.
function shortName(record) {
  return record.id.length > 12 ? `…${record.id.slice(-10)}` : record.id;
}

function outcome(record) {
  if (record.ended_at === null && record.output_tokens === 0) return record.attempts.length ? "prefill" : "waits";
  if (record.ended_at === null) return `${record.output_tokens} tok`;
  if (stateOf(record) === "good") return `${record.output_tokens} tok · ${duration(record.ended_at - record.arrived_at)}`;
  const named = words(record.outcome);
  return stateOf(record) === "bad" && record.status >= 400 ? `${named} ${record.status}` : named;
}

// Whole seconds or whole minutes: the spans are chosen so.
function ago(seconds) {
  return seconds < 60 ? `−${seconds} s` : `−${seconds / 60} min`;
}

class Timeline {
  #feed;
  #rows = new Map();
  #list = byId("requests");
  #made = 0;
  #pausedAt = null;
  #active = null;
  #pointer = "";
  #lastFrame = 0;
  #drawing = false;
  #calm = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(feed) {
    this.#feed = feed;
    feed.addEventListener("requests", ({ detail }) => this.#take(detail));
    byId("request-filter").addEventListener("input", () => this.#refresh());
    byId("request-kind").addEventListener("change", () => this.#refresh());
    byId("request-span").addEventListener("change", () => this.#refresh());
    byId("pause").addEventListener("click", () => this.#togglePause());
    document.addEventListener("view", () => this.#wake());
    document.addEventListener("visibilitychange", () => this.#wake());
    this.#list.addEventListener("keydown", (event) => this.#onKey(event));
    this.#list.addEventListener("focusin", ({ target }) => this.#choose(target));
    this.#list.addEventListener("pointerover", (event) => this.#onPointer(event));
    this.#list.addEventListener("click", ({ target }) => target.closest(".request")?.focus());
    this.#drawLegend();
    this.#refresh();
  }

  get #now() {
    return this.#pausedAt ?? this.#feed.now();
  }

  get #span() {
    return Number(byId("request-span").value);
  }

  // ---- what is there ----

  #take(records) {
    for (const record of records) this.#tellMoves(record);
    if (this.#pausedAt !== null) return;
    for (const record of records) {
      const row = this.#rows.get(keyOf(record)) ?? this.#insert(record);
      row.show(record, this.#now);
      if (row === this.#active) showDetails(record, this.#now);
    }
    this.#refresh();
  }

  #tellMoves(record) {
    const shown = this.#rows.get(keyOf(record))?.record;
    const moves = movesOf(record);
    if (shown && moves.length > movesOf(shown).length) {
      const { to, why } = moves.at(-1);
      announce(`Request ${shortName(record)} went on at ${to}: ${why}`);
    }
  }

  #insert(record) {
    const row = new Row(this.#made++);
    row.record = record;
    this.#rows.set(keyOf(record), row);
    const after = [...this.#list.children].find((other) => {
      const found = this.#rowOf(other)?.record;
      return found && found.arrived_at <= record.arrived_at;
    });
    this.#list.insertBefore(row.element, after ?? null);
    row.element.dataset.key = keyOf(record);
    return row;
  }

  #rowOf(element) {
    return this.#rows.get(element.dataset.key);
  }

  /** Show what the filter and the span let through, and forget what the feed forgot. */
  #refresh() {
    const wanted = byId("request-filter").value.trim();
    const kind = byId("request-kind").value;
    const since = this.#now - this.#span;
    let shown = 0;
    for (const [key, row] of this.#rows) {
      if (!this.#feed.requests.has(key)) {
        row.element.remove();
        this.#rows.delete(key);
        continue;
      }
      const isRecent = (row.record.ended_at ?? Infinity) > since;
      row.element.hidden = !(isRecent && isWanted(row.record, wanted, kind));
      shown += row.element.hidden ? 0 : 1;
    }
    this.#keepReachable();
    this.#note(shown);
    this.#drawAxis();
    this.#draw(true);
  }

  #note(shown) {
    const known = this.#rows.size;
    const { requests_running: running = 0, followed = 0 } = this.#feed.fleet?.router ?? {};
    const unseen = running > followed ? `; of those that run the first ${followed}` : "";
    setText(byId("requests-note"), known ? `${shown} of the last ${known}${unseen}` : "");
    const empty = byId("requests-empty");
    empty.hidden = shown > 0;
    setText(empty, known
      ? "Nothing in this span passes the filter."
      : "No requests yet. Each request for tokens becomes a bar here: try the chat.");
  }

  #drawAxis() {
    const span = this.#span;
    const now = this.#pausedAt === null ? "now" : "paused";
    const names = [4, 3, 2, 1].map((quarter) => ago(span * quarter / 4));
    names.push(now);
    const axis = byId("axis");
    while (axis.childElementCount < names.length) axis.append(make("span"));
    names.forEach((name, index) => setText(axis.children[index], name));
  }

  #drawLegend() {
    const entry = (name, text) =>
      make("li", {}, make("span", { className: `key ${name}` }), make("span", { textContent: text }));
    byId("legend").append(entry("queued", "waits"), entry("prefill", "prefill"), entry("tokens", "tokens, in the shard's colour"),
      entry("retained", "KV blocks retained"), entry("move", "goes on at another shard"), entry("end-cut", "cut short by the client"), entry("end-bad", "failed"));
  }

  // ---- drawing ----

  get #isSeen() {
    return !document.hidden && !byId("view-fleet").hidden;
  }

  #wake() {
    if (this.#isSeen) this.#refresh();
  }

  #draw(isChange = false) {
    if (!this.#isSeen) return;
    const now = this.#now;
    for (const row of this.#rows.values()) {
      if (row.element.hidden) continue;
      if (row.record.ended_at === null) row.stretch(now);
      row.scroll(now, this.#span);
    }
    if (isChange && !this.#drawing) this.#loop();
  }

  #loop() {
    this.#drawing = this.#isSeen && this.#pausedAt === null && this.#rows.size > 0;
    if (!this.#drawing) return;
    requestAnimationFrame((time) => {
      const least = this.#calm.matches ? REDUCED_FRAME_MS : FRAME_MS;
      const pause = Math.max(least, 1000 * this.#span / LANE_PIXELS);
      if (time - this.#lastFrame >= pause) {
        this.#lastFrame = time;
        this.#draw();
      }
      this.#loop();
    });
  }

  #togglePause() {
    this.#pausedAt = this.#pausedAt === null ? this.#feed.now() : null;
    const paused = this.#pausedAt !== null;
    const button = byId("pause");
    setText(button, paused ? "Go on" : "Pause");
    setAttributes(button, { "aria-pressed": String(paused) });
    // What came meanwhile.
    if (!paused) this.#take([...this.#feed.requests.values()]);
    this.#refresh();
  }

  // ---- choosing ----

  #visible() {
    return [...this.#list.children].filter((row) => !row.hidden);
  }

  /** One row is what the tab key finds. */
  #keepReachable() {
    const rows = this.#visible();
    const reachable = rows.find((row) => row === this.#active?.element) ?? rows[0];
    for (const row of rows) row.tabIndex = row === reachable ? 0 : -1;
  }

  // Where new rows push others below a pointer that rests, nobody has pointed at those.
  #onPointer({ target, clientX, clientY }) {
    const at = `${clientX},${clientY}`;
    if (at !== this.#pointer) this.#choose(target);
    this.#pointer = at;
  }

  #choose(target) {
    const element = target.closest(".request");
    const row = element && this.#rowOf(element);
    if (!row || (row === this.#active)) return;
    // Nor does the pointer take the keyboard's choice.
    if (this.#list.contains(document.activeElement) && document.activeElement !== element) return;
    this.#active?.element.setAttribute("aria-selected", "false");
    this.#active = row;
    element.setAttribute("aria-selected", "true");
    this.#keepReachable();
    showDetails(row.record, this.#now);
  }

  #onKey(event) {
    const rows = this.#visible();
    const place = rows.indexOf(document.activeElement);
    const places = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: rows.length - 1,
      PageDown: place + 10, PageUp: place - 10 };
    if (place < 0 || !(event.key in places)) return;
    event.preventDefault();
    rows[Math.min(rows.length - 1, Math.max(0, places[event.key]))].focus();
  }
}

export function startTimeline(feed) {
  return new Timeline(feed);
}
