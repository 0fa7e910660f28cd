// What clients for Node make of answers that mean nothing. Arguments: the client, the URL, the model. Prints
// what it saw, then begins a long answer, which it leaves when a line comes in.
import { once } from "node:events";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const [client, url, model] = process.argv.slice(2);
const MAX_TOKENS = 150;
const LONG = 30_000;
const QUESTION = "Which one is it?";
const messages = [{ role: "user", content: QUESTION }];
const description = "Takes one of them.";
const parameters = {
  type: "object",
  properties: { which: { enum: ["left", "right"] }, sure: { type: "boolean" } },
  required: ["which", "sure"],
  additionalProperties: false,
};

// Each gives what one answer was, whole or streamed; `choice` says whether a tool has to be called.
function ofAi(made) {
  const usual = { model: made(model), maxRetries: 0, temperature: 0, prompt: QUESTION };
  const limited = { ...usual, maxOutputTokens: MAX_TOKENS };
  const take = tool({ description, inputSchema: jsonSchema(parameters) });
  const said = ({ text, finishReason, usage }, calls) => ({
    text,
    reason: finishReason,
    tokens: [usage.inputTokens, usage.outputTokens],
    calls: calls.map((call) => [call.toolName, call.input]),
  });
  return {
    async whole(choice) {
      const given = choice ? { tools: { take }, toolChoice: choice } : {};
      const answer = await generateText({ ...limited, ...given });
      return said(answer, answer.toolCalls);
    },
    async streamed(choice) {
      const given = choice ? { tools: { take }, toolChoice: choice } : {};
      const answer = streamText({ ...limited, ...given });
      const pieces = [];
      for await (const piece of answer.textStream) pieces.push(piece);
      const [text, finishReason, usage, calls] = await Promise.all([
        answer.text, answer.finishReason, answer.usage, answer.toolCalls,
      ]);
      return { pieces, ...said({ text, finishReason, usage }, calls) };
    },
    async long(signal) {
      const asked = { ...usual, maxOutputTokens: LONG, abortSignal: signal, onError() {} };
      return streamText(asked).textStream;
    },
  };
}

function ofChat() {
  const api = new OpenAI({ apiKey: "none", baseURL: `${url}/v1`, maxRetries: 0 }).chat.completions;
  const usual = { model, messages, temperature: 0 };
  const limited = { ...usual, max_tokens: MAX_TOKENS };
  const tools = [{ type: "function", function: { name: "take", description, parameters } }];
  const given = (choice) => (choice ? { tools, tool_choice: choice } : {});
  const said = ({ choices: [{ message, finish_reason }], usage }) => ({
    text: message.content ?? "",
    reason: finish_reason,
    tokens: [usage.prompt_tokens, usage.completion_tokens],
    calls: (message.tool_calls ?? []).map(({ function: f }) => [f.name, JSON.parse(f.arguments)]),
  });
  return {
    whole: async (choice) => said(await api.create({ ...limited, ...given(choice) })),
    async streamed(choice) {
      const stream = api.stream({
        ...limited, ...given(choice), stream_options: { include_usage: true },
      });
      const pieces = [];
      stream.on("content", (piece) => pieces.push(piece));
      return { pieces, ...said(await stream.finalChatCompletion()) };
    },
    long: (signal) => api.create({ ...usual, max_tokens: LONG, stream: true }, { signal }),
  };
}

function ofResponses() {
  const api = new OpenAI({ apiKey: "none", baseURL: `${url}/v1`, maxRetries: 0 }).responses;
  const usual = { model, input: QUESTION, temperature: 0, store: false };
  const limited = { ...usual, max_output_tokens: MAX_TOKENS };
  const tools = [{ type: "function", name: "take", description, parameters, strict: true }];
  const given = (choice) => (choice ? { tools, tool_choice: choice } : {});
  const said = (answer) => ({
    text: answer.output_text,
    reason: answer.incomplete_details?.reason ?? answer.status,
    tokens: [answer.usage.input_tokens, answer.usage.output_tokens],
    calls: answer.output
      .filter((item) => item.type === "function_call")
      .map((call) => [call.name, JSON.parse(call.arguments)]),
  });
  return {
    whole: async (choice) => said(await api.create({ ...limited, ...given(choice) })),
    async streamed(choice) {
      const stream = api.stream({ ...limited, ...given(choice) });
      const pieces = [];
      stream.on("response.output_text.delta", ({ delta }) => pieces.push(delta));
      return { pieces, ...said(await stream.finalResponse()) };
    },
    long: (signal) => api.create({ ...usual, max_output_tokens: LONG, stream: true }, { signal }),
  };
}

function ofMessages() {
  const api = new Anthropic({ apiKey: "none", baseURL: url, maxRetries: 0 }).messages;
  const usual = { model, messages, temperature: 0 };
  const limited = { ...usual, max_tokens: MAX_TOKENS };
  const tools = [{ name: "take", description, input_schema: parameters }];
  const types = { auto: "auto", required: "any" };
  const given = (choice) => (choice ? { tools, tool_choice: { type: types[choice] } } : {});
  const said = ({ content, stop_reason, usage }) => ({
    text: content.filter(({ type }) => type === "text").map(({ text }) => text).join(""),
    reason: stop_reason,
    tokens: [usage.input_tokens + (usage.cache_read_input_tokens ?? 0), usage.output_tokens],
    calls: content.filter(({ type }) => type === "tool_use").map((use) => [use.name, use.input]),
  });
  return {
    whole: async (choice) => said(await api.create({ ...limited, ...given(choice) })),
    async streamed(choice) {
      const stream = api.stream({ ...limited, ...given(choice) });
      const pieces = [];
      stream.on("text", (piece) => pieces.push(piece));
      return { pieces, ...said(await stream.finalMessage()) };
    },
    long: (signal) => api.create({ ...usual, max_tokens: LONG, stream: true }, { signal }),
  };
}

const settings = { name: "here", apiKey: "none", baseURL: `${url}/v1` };
const clients = {
  "ai with openai-compatible": () => ofAi(createOpenAICompatible({ ...settings, includeUsage: true })),
  "ai with anthropic": () => ofAi(createAnthropic(settings)),
  "openai chat": ofChat,
  "openai responses": ofResponses,
  anthropic: ofMessages,
};
const asked = clients[client]();
const observed = {};
for (const how of ["whole", "streamed"]) {
  observed[how] = await asked[how]();
  observed[`${how} with a tool`] = await asked[how]("auto");
  observed[`${how} call`] = await asked[how]("required");
}
console.log(JSON.stringify(observed));

const leaving = new AbortController();
try {
  for await (const _ of await asked.long(leaving.signal)) {
    if (leaving.signal.aborted) continue;
    console.log("begun");
    await once(process.stdin, "data");
    leaving.abort();
  }
} catch (error) {
  if (!leaving.signal.aborted) throw error;
}
console.log("left");
// The process ends only when nobody has more to say: it is not its end that ends the answer.
process.stdin.resume();
