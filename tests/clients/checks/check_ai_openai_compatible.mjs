// npm: ai with @ai-sdk/openai-compatible
import assert from "node:assert/strict";
import test from "node:test";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const settings = { name: "tidemill", baseURL: `${process.argv[2]}/v1`, apiKey: "none", supportsStructuredOutputs: true };
const provider = createOpenAICompatible(settings);
const model = provider("tiny");
const asked = { model, prompt: "When is high water?", maxOutputTokens: 20, temperature: 0, maxRetries: 0 };

test("a text, whole and streamed", async () => {
  const whole = await generateText(asked);
  assert.equal(whole.usage.outputTokens, 20);
  let text = "";
  for await (const part of streamText(asked).textStream) text += part;
  assert.equal(text, whole.text);
});

test("a tool that must be called", async () => {
  const high_water = tool({ description: "Says when.", inputSchema: z.object({ port: z.enum(["Brest"]) }), execute: () => "noon" });
  const made = await generateText({ ...asked, maxOutputTokens: 400, tools: { high_water }, toolChoice: "required" });
  assert.equal(made.toolResults[0].output, "noon");
});

test("an object of a schema", async () => {
  const schema = z.object({ port: z.enum(["Brest", "Hull"]), isSpring: z.boolean() });
  const made = await generateObject({ ...asked, maxOutputTokens: 400, schema });
  assert.ok(schema.safeParse(made.object).success);
});

test("embeddings and errors", async () => {
  const made = await embedMany({ model: provider.textEmbeddingModel("tiny"), values: ["sea", "land"], maxRetries: 0 });
  assert.deepEqual(made.embeddings.map((one) => one.length), [64, 64]);
  await assert.rejects(generateText({ ...asked, model: provider("huge") }), /huge|Not Found/);
});
