// npm: ai with ollama-ai-provider-v2
import assert from "node:assert/strict";
import test from "node:test";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const provider = createOllama({ baseURL: `${process.argv[2]}/api` });
const model = provider("tiny");
// The provider's own limit and temperature are fields that Ollama does not know.
const limited = (num_predict) => ({ ollama: { options: { num_predict, temperature: 0 } } });
const asked = { model, prompt: "When is high water?", maxRetries: 0, maxOutputTokens: 20, providerOptions: limited(20) };

test("a text, whole and streamed", async () => {
  const whole = await generateText(asked);
  assert.equal(whole.usage.outputTokens, 20);
  let text = "";
  for await (const part of streamText(asked).textStream) text += part;
  assert.equal(text, whole.text);
});

test("a tool is offered", async () => {
  const high_water = tool({ description: "Says when.", inputSchema: z.object({ port: z.enum(["Brest"]) }), execute: () => "noon" });
  const made = await generateText({ ...asked, tools: { high_water } }); // Ollama's API has no tool_choice
  assert.equal(made.finishReason, "length");
});

test("an object of a schema", async () => {
  const schema = z.object({ port: z.enum(["Brest", "Hull"]), isSpring: z.boolean() });
  const made = await generateObject({ ...asked, providerOptions: limited(400), schema });
  assert.ok(schema.safeParse(made.object).success);
});

test("embeddings and errors", async () => {
  const made = await embedMany({ model: provider.textEmbeddingModel("tiny"), values: ["sea", "land"], maxRetries: 0 });
  assert.deepEqual(made.embeddings.map((one) => one.length), [64, 64]);
  await assert.rejects(generateText({ ...asked, model: provider("huge") }), /huge|Not Found/);
});
