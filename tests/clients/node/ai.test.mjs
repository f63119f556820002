// Vercel's AI SDK, with its provider for OpenAI-compatible servers, and with its provider for OpenAI in both of its modes.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as c from "./conversations.mjs";

const options = { baseURL: c.BASE_URL, apiKey: c.API_KEY };
const compatible = createOpenAICompatible({
  name: "inflight",
  includeUsage: true,
  supportsStructuredOutputs: true,
  ...options,
});
const models = {
  "openai-compatible": compatible(c.MODEL),
  "openai in chat mode": createOpenAI(options).chat(c.MODEL),
  "openai": createOpenAI(options)(c.MODEL),
};
const Person = z.object({ name: z.string(), age: z.number().int() });
const weather = (more = {}) =>
  tool({
    description: c.WEATHER_DESCRIPTION,
    inputSchema: z.object({ city: z.string() }),
    execute: async () => c.WEATHER_RESULT,
    ...more,
  });

for (const [name, model] of Object.entries(models)) {
  const common = { model, temperature: 0, maxRetries: 0 };

  test(`${name}: text and usage`, async () => {
    const answer = await generateText({ ...common, prompt: c.SUM });
    assert.equal(answer.text, c.SUM_ANSWER);
    assert.ok(answer.usage.outputTokens > 5);
  });

  test(`${name}: stream and its usage`, async () => {
    const stream = streamText({ ...common, prompt: c.SUM });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, c.SUM_ANSWER);
    assert.ok((await stream.usage).outputTokens > 5);
  });

  test(`${name}: abort in mid-stream`, async () => {
    const abort = new AbortController();
    const stream = streamText({ ...common, prompt: c.STORY, abortSignal: abort.signal });
    for await (const _ of stream.textStream) abort.abort();
    assert.equal((await generateText({ ...common, prompt: c.SUM })).text, c.SUM_ANSWER);
  });

  for (const strict of [undefined, true]) {
    test(`${name}: tool loop, strict ${strict}`, async () => {
      const answer = await generateText({
        ...common,
        prompt: c.WEATHER_QUESTION,
        tools: { get_weather: weather({ strict }) },
        stopWhen: stepCountIs(4),
      });
      assert.deepEqual(answer.steps[0].toolCalls[0].input, c.WEATHER_CALL);
      assert.equal(answer.text, c.WEATHER_ANSWER);
    });
  }

  test(`${name}: streamed tool loop`, async () => {
    const tools = { get_weather: weather() };
    const stream = streamText({ ...common, prompt: c.WEATHER_QUESTION, tools, stopWhen: stepCountIs(4) });
    await stream.consumeStream();
    assert.equal(await stream.text, c.WEATHER_ANSWER);
  });

  test(`${name}: structured output`, async () => {
    const answer = await generateText({ ...common, prompt: c.EXTRACT, output: Output.object({ schema: Person }) });
    assert.deepEqual(answer.output, c.PERSON);
  });

  test(`${name}: structured output with a strict tool`, async () => {
    const answer = await generateText({
      ...common,
      prompt: c.WEATHER_QUESTION,
      tools: { get_weather: weather({ strict: true, execute: undefined }) },
      output: Output.object({ schema: Person }),
    });
    assert.deepEqual(answer.toolCalls[0].input, c.WEATHER_CALL);
  });

  test(`${name}: a zod record in a strict tool`, async () => {
    const answer = await generateText({
      ...common,
      prompt: c.SUM,
      maxOutputTokens: 300,
      toolChoice: "required",
      tools: {
        set_pairs: tool({ inputSchema: z.object({ pairs: z.record(z.string(), z.string()) }), strict: true }),
      },
    });
    assert.ok(answer.finishReason);
  });

  test(`${name}: fixed maxOutputTokens while the conversation grows`, async () => {
    const answer = await generateText({ ...common, messages: c.longHistory(), maxOutputTokens: 2000 });
    assert.equal(answer.finishReason, "stop");
  });

  test(`${name}: context overflow`, async () => {
    await assert.rejects(generateText({ ...common, prompt: c.TOO_LONG }), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 400);
      assert.equal(error.isRetryable, false);
      assert.match(error.message, /maximum context length is 2048 tokens/);
      return true;
    });
  });
}

test("wrong key", async () => {
  const model = createOpenAICompatible({ name: "inflight", ...options, apiKey: "wrong" })(c.MODEL);
  await assert.rejects(generateText({ model, prompt: c.SUM, maxRetries: 0 }), (error) => {
    assert.equal(error.statusCode, 401);
    assert.match(error.message, /Incorrect API key provided/);
    return true;
  });
});
