// A request's record to the parts of its bar. Pure: times go in and come out in unix seconds.

import { words } from "./format.js";

/**
 * The parts of a bar, in order: {kind, from, to, shard}. Kinds are queued (it waits for a place),
 * prefill (a shard has it, and no token came yet), tokens, gap (it waits for another shard), and
 * retained (its shard was asked to retain its KV blocks). Of several sequences it is the first one's.
 */
export function segmentsOf(record, now) {
  const end = record.ended_at ?? now;
  const attempts = firstSequence(record);
  const parts = [];
  const add = (kind, from, to, shard = "") => {
    const until = Math.min(to, end);
    if (until > from) parts.push({ kind, from, to: until, shard });
  };
  add("queued", record.arrived_at, attempts[0]?.sent_at ?? end);
  attempts.forEach((attempt, index) => {
    const next = attempts[index + 1]?.sent_at ?? end;
    const over = Math.min(attempt.ended_at ?? next, next);
    const first = attempt.first_token_at ?? over;
    add("prefill", attempt.sent_at, first, attempt.shard);
    add("tokens", first, over, attempt.shard);
    if (index + 1 < attempts.length) add("gap", over, next);
  });
  if (record.ended_at !== null && record.retained_s) {
    parts.push({ kind: "retained", from: end, to: end + record.retained_s, shard: attempts.at(-1)?.shard ?? "" });
  }
  return parts;
}

/** Where a request went on at another shard: {at, from, to, why}. */
export function movesOf(record) {
  const attempts = firstSequence(record);
  return attempts.slice(1).map((attempt, index) => ({
    at: attempt.sent_at,
    from: attempts[index].shard,
    to: attempt.shard,
    why: words(attempts[index].ended_because || "it went away"),
  }));
}

/** Attempts of the first of its sequences, in order. */
function firstSequence(record) {
  return record.attempts.filter((attempt) => !attempt.sequence);
}

export function sequencesOf(record) {
  return 1 + Math.max(0, ...record.attempts.map((attempt) => attempt.sequence ?? 0));
}

const GOOD = new Set(["stop", "length", "ok"]);
const CUT = new Set(["disconnect", "abandoned", "shutdown"]);

/** running, good, cut (nobody wanted more) or bad. */
export function stateOf(record) {
  if (record.ended_at === null) return "running";
  if (GOOD.has(record.outcome)) return "good";
  return CUT.has(record.outcome) ? "cut" : "bad";
}

/** Seconds from its arrival to its first token; null: none came yet. */
export function firstTokenAfter(record) {
  return record.first_token_at === null ? null : record.first_token_at - record.arrived_at;
}

/** Tokens a second after the first one; null: too few. */
export function tokenRate(record, now) {
  const seconds = (record.ended_at ?? now) - (record.first_token_at ?? now);
  return record.output_tokens > 1 && seconds > 0 ? (record.output_tokens - 1) / seconds : null;
}

/** Whether a filter's words and kind let a record through. */
export function isWanted(record, wanted, kind) {
  const state = stateOf(record);
  if (kind === "running" && state !== "running") return false;
  if (kind === "failed" && state !== "bad" && state !== "cut") return false;
  if (kind === "moved" && movesOf(record).length === 0) return false;
  if (!wanted) return true;
  const shards = record.attempts.map((attempt) => attempt.shard);
  const text = [record.id, record.model, record.route, record.key, record.session, record.outcome, record.error,
    record.status, ...shards].join(" ").toLowerCase();
  return wanted.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
