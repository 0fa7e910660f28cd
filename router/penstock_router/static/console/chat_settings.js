// What a chat is sent with: the form, and the body that it stands for. What is empty is not sent;
// what is wrong is for the server to refuse, in its words.

import { keyHeaders } from "./access.js";
import { byId, make } from "./dom.js";

const FIELDS = [
  ["system", "System prompt", { rows: 3 }, "Said before the first message."],
  ["max_tokens", "max_tokens", { value: "256" }, "Empty: up to the end of the context."],
  ["temperature", "temperature", { value: "0.8" }, "0 takes the likeliest token."],
  ["top_p", "top_p", {}, "Draw from the likeliest that add up to this."],
  ["top_k", "top_k", {}, "Draw from so many."],
  ["min_p", "min_p", {}, "Draw from those at least so likely, relative to the likeliest."],
  ["seed", "seed", {}, "The same request with the same seed gets the same answer."],
  ["stop", "stop", { rows: 1 }, "Texts that end the answer, one a line."],
  ["presence_penalty", "presence_penalty", {}, "On tokens that the answer has."],
  ["frequency_penalty", "frequency_penalty", {}, "The same, for each time."],
  ["repetition_penalty", "repetition_penalty", {}, "Above 1: less of what occurred."],
];
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
  "frequency_penalty", "repetition_penalty"];

const input = (name) => byId(`set-${name}`);

// By name, what /v1/models says of each.
const cards = new Map();

/** `onModel` is called when another model is chosen. */
export function drawSettings(onModel) {
  const model = make("select", { id: "set-model" });
  model.addEventListener("change", onModel);
  const probabilities = make("input", { id: "set-logprobs", type: "checkbox", checked: true });
  const alternatives = make("input", { id: "set-top_logprobs", inputMode: "numeric", value: "5", autocomplete: "off" });
  byId("settings").append(
    field("model", "Model", model, ""),
    ...FIELDS.map(([name, title, properties, help]) => field(name, title, control(name, properties), help)),
    make("label", { className: "check wide" }, probabilities, " Show the probability of each token"),
    field("top_logprobs", "Alternatives", alternatives, "Beside each token; at most 20."),
  );
}

function control(name, properties) {
  const common = { id: `set-${name}`, spellcheck: false };
  if (properties.rows) return make("textarea", { ...common, ...properties });
  const kind = { type: "text", inputMode: name === "seed" || name.startsWith("max") ? "numeric" : "decimal" };
  return make("input", { ...common, ...kind, autocomplete: "off", ...properties });
}

function field(name, title, element, help) {
  const wide = element.tagName !== "INPUT" ? "wide" : "";
  element.title = help;
  return make("label", { className: wide, htmlFor: element.id }, make("span", { textContent: title }), element);
}

/** Fill the choice of models; keeps what was chosen. Raises what the fetch does. */
export async function learnModels() {
  const answer = await fetch("v1/models", { headers: keyHeaders() });
  if (!answer.ok) return;
  const select = input("model");
  const chosen = select.value;
  cards.clear();
  for (const card of (await answer.json()).data) cards.set(card.id, card);
  const names = [...cards.keys()];
  select.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
  if (names.includes(chosen)) select.value = chosen;
}

/** Why the chosen model gets no images; empty where it sees them, or nothing is known of it. */
export function whyNoImages() {
  const model = input("model").value;
  const sees = cards.get(model)?.input_modalities?.includes("image") ?? true;
  return sees ? "" : `The model ${model} takes no images.`;
}

/** The body of a request for an answer to these messages. */
export function bodyFor(messages) {
  const system = input("system").value;
  const body = {
    model: input("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    const text = input(name).value.trim();
    if (text) body[name] = numberOr(text);
  }
  const stops = input("stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  if (input("logprobs").checked) {
    body.logprobs = true;
    body.top_logprobs = numberOr(input("top_logprobs").value.trim() || "0");
  }
  return body;
}

// What is no number goes as it is, to be refused with a reason. Integers beyond 2^53, which seeds may
// be, lose their last digits: that much a browser cannot write.
function numberOr(text) {
  const value = Number(text);
  return Number.isFinite(value) ? value : text;
}
