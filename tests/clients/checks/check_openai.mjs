// npm: openai
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "When is high water?" }];
const parameters = {
  type: "object", properties: { port: { enum: ["Brest"] } }, required: ["port"], additionalProperties: false,
};

test("a chat, whole and streamed", async () => {
  const asked = { model: "tiny", messages, max_tokens: 20, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  assert.equal(whole.usage.completion_tokens, 20);
  const streamed = await client.chat.completions.stream(asked).finalContent();
  assert.equal(streamed, whole.choices[0].message.content);
});

test("tools run by the client", async () => {
  const seen = [];
  const run = (given) => (seen.push(given), "at noon");
  const tool = { type: "function", function: { name: "high_water", parameters, parse: JSON.parse, function: run } };
  const choice = { type: "function", function: { name: "high_water" } };
  const asked = { model: "tiny", messages, tools: [tool], tool_choice: choice, max_tokens: 400, temperature: 0 };
  await client.chat.completions.runTools(asked).done();
  assert.deepEqual(seen, [{ port: "Brest" }]);
});

test("responses, whole, streamed and with a format", async () => {
  const asked = { model: "smollm2", input: "When is high water?", max_output_tokens: 16, temperature: 0 };
  const whole = await client.responses.create(asked);
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  const format = { type: "json_schema", name: "port", schema: parameters };
  const shaped = await client.responses.create({ ...asked, model: "tiny", max_output_tokens: 400, text: { format } });
  assert.deepEqual(JSON.parse(shaped.output_text), { port: "Brest" });
});

test("embeddings, models and errors", async () => {
  const made = await client.embeddings.create({ model: "tiny", input: ["sea", "land"] });
  assert.deepEqual(made.data.map((one) => one.embedding.length), [64, 64]);
  assert.equal((await client.models.list()).data.length, 3);
  await assert.rejects(client.chat.completions.create({ model: "huge", messages }), OpenAI.NotFoundError);
});
