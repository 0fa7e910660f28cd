// What Vercel's AI SDK makes of penstock's answers. Arguments: the provider, the URL, the model.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const [provider, url, name] = process.argv.slice(2);
const settings = { name: "here", apiKey: "none", baseURL: `${url}/v1` };
const providers = {
  anthropic: () => createAnthropic(settings),
  "openai-compatible": () =>
    createOpenAICompatible({ ...settings, includeUsage: true, supportsStructuredOutputs: true }),
};
const model = providers[provider]()(name);
const usual = { model, maxRetries: 0, maxOutputTokens: 400 };

const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => ({ total: a + b }),
});

async function chat() {
  const answer = await generateText({ ...usual, system: "Be brief.", prompt: "CHAT" });
  return said(answer);
}

async function stream() {
  const streamed = streamText({ ...usual, prompt: "CHAT" });
  const pieces = [];
  for await (const piece of streamed.textStream) pieces.push(piece);
  const [text, reasoning, reason, usage] = await Promise.all([
    streamed.text,
    streamed.reasoningText,
    streamed.finishReason,
    streamed.usage,
  ]);
  return { pieces, ...said({ text, reasoningText: reasoning, finishReason: reason, usage }) };
}

async function calls(streams) {
  const asked = { ...usual, prompt: "ADD", tools: { add }, stopWhen: isStepCount(3) };
  const answer = streams ? streamText(asked) : await generateText(asked);
  const steps = await answer.steps;
  return {
    called: steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input])),
    results: steps.flatMap((step) => step.toolResults.map((result) => result.output)),
    ...said(steps.at(-1)),
  };
}

async function object() {
  const schema = z.object({ city: z.string(), people: z.number() });
  const output = Output.object({ schema });
  return (await generateText({ ...usual, prompt: `OBJECT for ${provider}`, output })).output;
}

function said(answer) {
  return {
    text: answer.text,
    reasoning: answer.reasoningText ?? null,
    reason: answer.finishReason,
    tokens: [answer.usage.inputTokens, answer.usage.outputTokens],
  };
}

const observed = {
  chat: await chat(),
  stream: await stream(),
  calls: await calls(false),
  streamed_calls: await calls(true),
  object: await object(),
};
console.log(JSON.stringify(observed));
