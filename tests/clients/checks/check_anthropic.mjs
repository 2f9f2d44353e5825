// npm: @anthropic-ai/sdk
import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "tiny", max_tokens: 200, messages: [{ role: "user", content: "When is high water?" }] };
const input_schema = {
  type: "object", properties: { port: { enum: ["Brest"] } }, required: ["port"], additionalProperties: false,
};
const tool_choice = { type: "tool", name: "high_water", disable_parallel_tool_use: true };

test("a message, whole and streamed", async () => {
  const greedy = { ...asked, max_tokens: 20, temperature: 0 };
  const whole = await client.messages.create(greedy);
  assert.equal(whole.usage.output_tokens, 20);
  assert.equal(await client.messages.stream(greedy).finalText(), whole.content[0].text);
});

test("the tool runner", async () => {
  const seen = [];
  const run = (given) => (seen.push(given), "at noon");
  const tool = { type: "custom", name: "high_water", input_schema, run, parse: (given) => given };
  for (const stream of [false, true]) {
    const runner = client.beta.messages.toolRunner({ ...asked, tools: [tool], tool_choice, max_iterations: 2, stream });
    for await (const reply of runner) {
      const message = stream ? await reply.finalMessage() : reply;
      assert.equal(message.stop_reason, "tool_use");
    }
  }
  assert.ok(seen.length >= 2);
  assert.deepEqual(seen[0], { port: "Brest" });
});

test("counts, batches and errors", async () => {
  const { input_tokens } = await client.messages.countTokens({ model: "tiny", messages: asked.messages });
  assert.ok(input_tokens > 10);
  let batch = await client.messages.batches.create({ requests: [{ custom_id: "one", params: { ...asked, max_tokens: 5 } }] });
  while (batch.processing_status !== "ended") {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.messages.batches.retrieve(batch.id);
  }
  const kinds = [];
  for await (const line of await client.messages.batches.results(batch.id)) kinds.push(line.result.type);
  assert.deepEqual(kinds, ["succeeded"]);
  await assert.rejects(client.messages.create({ ...asked, model: "huge" }), (error) => {
    assert.ok(error instanceof Anthropic.NotFoundError);
    assert.ok(error.requestID);
    return true;
  });
});
