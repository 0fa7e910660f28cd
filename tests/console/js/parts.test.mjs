// What of the console is pure: events, bars, numbers, bodies, commands. Run by node's own test runner.

import assert from "node:assert/strict";
import { test } from "node:test";

import { contentOf } from "./console/attachments.js";
import { curlOf } from "./console/curl.js";
import { Feed, keyOf } from "./console/feed.js";
import { bytes, count, duration, percent, rate, visible } from "./console/format.js";
import { Samples } from "./console/samples.js";
import { firstTokenAfter, isWanted, movesOf, segmentsOf, stateOf, tokenRate } from "./console/segments.js";
import { EventParser } from "./console/sse.js";

test("events are whole whatever pieces they come in", () => {
  const text = "event: fleet\ndata: {\"a\":1}\n\n: keep-alive\n\ndata: one\r\ndata: two\r\n\r\nid: 7\ndata:x\n\n";
  for (let size = 1; size <= text.length; size += 1) {
    const parser = new EventParser();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...parser.feed(text.slice(at, at + size)));
    assert.deepEqual(found.map(({ event, data }) => [event, data]),
      [["fleet", '{"a":1}'], ["message", "one\ntwo"], ["message", "x"]], `in pieces of ${size}`);
  }
});

test("of a feed that is taken up again, requests that its router does not know run no longer", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const one = (id, ended_at) => ({ id, arrived_at: 100, ended_at, output_tokens: 1, attempts: [] });
  const connections = [
    [[one("lost", null), one("kept", null), one("done", 101)], [one("later", null)]],
    [[one("kept", null)], [one("new", null)]],
  ];
  context.mock.method(globalThis, "fetch", async () => new Response(
    connections.shift().map((records) => `event: requests\ndata: ${JSON.stringify(records)}\n\n`).join("")));
  const feed = new Feed("console/feed", () => ({}));
  const ids = async () => {
    feed.connect();
    await new Promise((resolve) => { feed.addEventListener("state", resolve, { once: true }); });
    return [...feed.requests.values()].map((record) => record.id);
  };
  assert.deepEqual(await ids(), ["lost", "kept", "done", "later"]);
  feed.state = "live";
  assert.deepEqual(await ids(), ["kept", "done", "new"]);
});

test("requests to which clients gave one id are told apart", () => {
  assert.notEqual(keyOf({ id: "a", arrived_at: 100 }), keyOf({ id: "a", arrived_at: 101 }));
});

const attempt = (shard, sent_at, first_token_at, ended_at, ended_because = "", sequence = 0) =>
  ({ shard, sent_at, first_token_at, ended_at, ended_because, sequence, reason: "least_load" });
const record = (attempts, more = {}) => ({
  id: "r", route: "/v1/completions", model: "m", key: "", outcome: "", error: "", status: 0,
  arrived_at: 100, first_token_at: null, ended_at: null, output_tokens: 0, attempts, ...more,
});
const parts = (one, now) => segmentsOf(one, now).map(({ kind, from, to, shard }) => [kind, from, to, shard]);

test("a request that waits is one part that grows", () => {
  assert.deepEqual(parts(record([]), 103), [["queued", 100, 103, ""]]);
});

test("a request is queued, prefilled, and makes tokens until its end", () => {
  const one = record([attempt("a", 101, 102, 105)], { ended_at: 105, outcome: "stop" });
  assert.deepEqual(parts(one, 110), [["queued", 100, 101, ""], ["prefill", 101, 102, "a"], ["tokens", 102, 105, "a"]]);
  assert.deepEqual(movesOf(one), []);
});

test("what its shard was asked to retain is a part behind its end, and none while it runs", () => {
  const made = [attempt("a", 100, 101, 103)];
  const one = record(made, { ended_at: 103, outcome: "stop", retained_s: 60 });
  assert.deepEqual(parts(one, 110), [["prefill", 100, 101, "a"], ["tokens", 101, 103, "a"], ["retained", 103, 163, "a"]]);
  assert.deepEqual(parts(record(made, { retained_s: 60 }), 102), [["prefill", 100, 101, "a"], ["tokens", 101, 102, "a"]]);
});

test("a request that went on elsewhere has a part for each shard, the wait between, and a mark", () => {
  const one = record([attempt("a", 100, 101, 103, "engine_died"), attempt("b", 104, 105, null)]);
  assert.deepEqual(parts(one, 107), [["prefill", 100, 101, "a"], ["tokens", 101, 103, "a"],
    ["gap", 103, 104, ""], ["prefill", 104, 105, "b"], ["tokens", 105, 107, "b"]]);
  assert.deepEqual(movesOf(one), [{ at: 104, from: "a", to: "b", why: "engine died" }]);
});

test("a bar is of the first of several sequences, and of no time that did not pass", () => {
  const one = record([attempt("a", 100, null, 102, "unavailable"), attempt("b", 100, 101, 104, "", 1), attempt("b", 102, null, null)]);
  assert.deepEqual(parts(one, 103), [["prefill", 100, 102, "a"], ["prefill", 102, 103, "b"]]);
});

test("how a request ended is good, cut short, or bad", () => {
  const ended = (outcome) => stateOf(record([], { ended_at: 101, outcome }));
  assert.deepEqual(["stop", "length", "ok"].map(ended), ["good", "good", "good"]);
  assert.deepEqual(["disconnect", "shutdown"].map(ended), ["cut", "cut"]);
  assert.deepEqual(["error", "refused", "timeout"].map(ended), ["bad", "bad", "bad"]);
  assert.equal(stateOf(record([])), "running");
});

test("times of a request are from its arrival, and a rate needs two tokens", () => {
  const one = record([], { first_token_at: 102, ended_at: 106, output_tokens: 9 });
  assert.equal(firstTokenAfter(one), 2);
  assert.equal(tokenRate(one, 0), 2);
  assert.equal(tokenRate(record([], { first_token_at: 102, output_tokens: 1 }), 105), null);
});

test("a filter takes all its words, in whatever field they are", () => {
  const one = record([attempt("10.0.0.1:50051", 100, null, null)], { id: "chat-7", model: "Toy" });
  assert.ok(isWanted(one, "toy 50051", "all"));
  assert.ok(!isWanted(one, "toy 50052", "all"));
  assert.ok(isWanted(one, "", "running"));
  assert.ok(!isWanted(one, "", "moved"));
  assert.ok(!isWanted(one, "", "failed"));
});

test("numbers are short and keep what matters of them", () => {
  assert.deepEqual([0.0004, 0.041, 1.2401, 12.44, 185, 59.99].map(duration),
    ["0.4 ms", "41 ms", "1.24 s", "12.4 s", "3 min 05 s", "1 min 00 s"]);
  assert.deepEqual([null, undefined].map(duration), ["–", "–"]);
  assert.deepEqual([0, 1234567, null].map(count), ["0", "1,234,567", "–"]);
  assert.deepEqual([0.5, 0.00312, 0.00001, 1].map(percent), ["50.0 %", "0.31 %", "<0.01 %", "100 %"]);
  assert.deepEqual([12.34, 1234.5, null].map(rate), ["12.3", "1,235", "–"]);
  assert.deepEqual([12, 1500, 2500000].map(bytes), ["12 B", "1.5 kB", "2.5 MB"]);
});

test("blanks of a token are seen, and halves of a character are bytes", () => {
  assert.equal(visible(" a\n", [32, 97, 10]), "␣a⏎");
  assert.equal(visible("\uFFFD", [0xe4, 0xb8]), "<E4><B8>");
  assert.equal(visible("", []), "(empty)");
});

test("a body to begin with has what is required and few tokens", () => {
  const message = { type: "object", required: ["role", "content"], properties: { role: { type: "string" },
    content: { anyOf: [{ type: "string" }, { type: "null" }] } } };
  const schema = { type: "object", required: ["messages"], properties: {
    messages: { type: "array", items: { $ref: "#/components/schemas/Message" } },
    max_tokens: { anyOf: [{ type: "integer" }, { type: "null" }] }, stream: { type: "boolean" } } };
  const samples = new Samples({ components: { schemas: { Message: message } } }, "toy");
  assert.deepEqual(JSON.parse(samples.body(schema, true)),
    { messages: [{ role: "user", content: "What is a shard?" }], max_tokens: 64, stream: true });
});

test("a curl command says the same request and never the key", () => {
  const command = curlOf({ url: "http://h/v1/x", method: "POST", hasKey: true,
    headers: [["Content-Type", "application/json"]], body: '{"a": "it\'s"}' });
  assert.equal(command, "curl 'http://h/v1/x' -H \"Authorization: Bearer $PENSTOCK_API_KEY\" " +
    "-H 'Content-Type: application/json' -N -d '{\"a\": \"it'\\''s\"}'");
  assert.equal(curlOf({ url: "http://h/", method: "GET", headers: [], body: null, hasKey: false }), "curl 'http://h/'");
});

test("a message with images has them before its text, and one without is a text", () => {
  const image = { name: "a.png", url: "data:image/png;base64,AA==" };
  const part = { type: "image_url", image_url: { url: image.url } };
  assert.equal(contentOf("Hello", []), "Hello");
  assert.deepEqual(contentOf("Hello", [image, image]), [part, part, { type: "text", text: "Hello" }]);
  assert.deepEqual(contentOf(" ", [image]), [part]);
});
