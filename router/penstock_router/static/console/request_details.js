// One request in full: where it was, how long each part took, and how it ended.

import { colourOf } from "./colours.js";
import { byId, make } from "./dom.js";
import { clock, count, duration, rate, words } from "./format.js";
import { firstTokenAfter, movesOf, sequencesOf, stateOf, tokenRate } from "./segments.js";

/** A record in one sentence, for who does not see the bar. */
export function describe(record, now) {
  const moves = movesOf(record).map((move) => `, went on at ${move.to}: ${move.why}`).join("");
  const shard = record.attempts[0] ? ` at ${record.attempts[0].shard}` : "";
  const how = stateOf(record) === "running" ? "runs" : words(record.outcome);
  const took = duration((record.ended_at ?? now) - record.arrived_at);
  return `${record.route} ${record.id}, ${how}, ${record.output_tokens} tokens in ${took}${shard}${moves}`;
}

/** Fill the panel beside the time line. */
export function showDetails(record, now) {
  const facts = [
    ["Id", record.id, "mono"],
    ["Route", record.route, "mono"],
    ["Model", record.model || "–"],
    ["Key", record.key || "none"],
    ["Session", record.session || "none"],
    ["Arrived", clock(record.arrived_at)],
    ["Outcome", outcome(record), stateOf(record)],
    ["Tokens", tokens(record)],
    ["Retained", record.retained_s ? `for ${duration(record.retained_s)}` : "no"],
    ["Waited", duration((record.placed_at ?? record.ended_at ?? now) - record.arrived_at)],
    ["First token", duration(firstTokenAfter(record))],
    ["Tokens a second", rate(tokenRate(record, now))],
    ["Took", duration((record.ended_at ?? now) - record.arrived_at)],
  ];
  const list = make("dl", {}, ...facts.map(([name, value, className = ""]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value, className }))));
  const several = sequencesOf(record);
  byId("details").replaceChildren(
    make("h4", { textContent: several > 1 ? `${several} sequences; the bar is the first one's` : "Request" }),
    list, make("h4", { textContent: "Shards" }), attempts(record));
}

function outcome(record) {
  if (record.ended_at === null) return "runs";
  // Of who just left there is none to tell of.
  const error = record.error && stateOf(record) === "bad" ? `: ${record.error}` : "";
  return `${words(record.outcome)}${error} (${record.status})`;
}

function tokens(record) {
  const cached = record.cached_tokens ? `, ${count(record.cached_tokens)} cached` : "";
  return `${count(record.prompt_tokens)} in${cached}, ${count(record.output_tokens)} out`;
}

function attempts(record) {
  if (!record.attempts.length) return make("p", { className: "quiet", textContent: "None has it." });
  return make("ol", { className: "attempts" }, ...record.attempts.map((attempt) => {
    const first = attempt.first_token_at === null ? "no token yet" : `first token after ${duration(attempt.first_token_at - attempt.sent_at)}`;
    const end = attempt.ended_because ? `ended: ${words(attempt.ended_because)}` : "";
    const kv = attempt.cached_tokens ? `${count(attempt.cached_tokens)} of ${count(attempt.tokens)} tokens cached` : "";
    const from = attempt.kv_source ? `KV from ${attempt.kv_source}` : "";
    const which = attempt.sequence ? `sequence ${attempt.sequence + 1}` : "";
    return make("li", { className: colourOf(attempt.shard) },
      make("span", { className: "swatch" }), make("span", { className: "mono", textContent: attempt.shard }),
      make("span", { className: "quiet", textContent: [which, `chosen: ${words(attempt.reason)}`, first, kv, from].filter(Boolean).join(" · ") }),
      end ? make("span", { className: "why", textContent: end }) : null);
  }));
}
