// From the OpenAPI document's schemas to a body to begin with. Pure.

const MODEL_FIELDS = ["prompt", "inputs", "input"];
const LIMITS = ["max_tokens", "max_output_tokens"];

export class Samples {
  #schemas;
  #model;

  constructor(document, model) {
    this.#schemas = document.components?.schemas ?? {};
    this.#model = model;
  }

  /** A body of this schema as text: what is required, something to work on, and few tokens. */
  body(schema, streams) {
    const form = schema.properties ? schema : schema.anyOf[0];
    const body = this.#object(form);
    if (!Object.keys(body).length) {
      const name = MODEL_FIELDS.find((one) => form.properties[one]);
      if (name) body[name] = this.#value(form.properties[name], name);
    }
    const limit = LIMITS.find((name) => form.properties[name] && this.#choices(form.properties[name])[0]?.type === "integer");
    if (limit) body[limit] = 64;
    if (form.properties.stream && streams) body.stream = true;
    return JSON.stringify(body, null, 2);
  }

  #resolve(schema) {
    return schema.$ref ? this.#schemas[schema.$ref.split("/").pop()] : schema;
  }

  #choices(schema) {
    return (schema.anyOf ?? [schema]).filter((choice) => choice.type !== "null");
  }

  #value(given, name) {
    const schema = this.#resolve(given);
    const [first] = this.#choices(schema);
    if (first && first !== schema) return this.#value(first, name);
    if (schema.enum) return schema.enum[0] ?? null;
    if (schema.type === "object") return this.#object(schema);
    if (schema.type === "array") return schema.items ? [this.#value(schema.items, name)] : [];
    if (schema.type === "boolean") return false;
    if (schema.type === "integer" || schema.type === "number") return 1;
    if (name === "model") return this.#model;
    return name === "role" ? "user" : "What is a shard?";
  }

  #object(schema) {
    const required = schema.required ?? [];
    return Object.fromEntries(required.map((name) => [name, this.#value(schema.properties[name], name)]));
  }
}
