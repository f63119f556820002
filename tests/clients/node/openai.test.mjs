// OpenAI's own Node SDK.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as c from "./conversations.mjs";

const client = new OpenAI({ baseURL: c.BASE_URL, apiKey: c.API_KEY, maxRetries: 0, timeout: 60_000 });
const greedy = { model: c.MODEL, temperature: 0 };
const Person = z.object({ name: z.string(), age: z.number().int() });
const weatherTool = zodFunction({
  name: "get_weather",
  description: c.WEATHER_DESCRIPTION,
  parameters: z.object({ city: z.string() }),
});
const ask = (content, more = {}) =>
  client.chat.completions.create({ ...greedy, messages: [c.user(content)], ...more });

test("chat and its usage", async () => {
  const answer = await ask(c.SUM);
  assert.equal(answer.choices[0].message.content, c.SUM_ANSWER);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("completion", async () => {
  const answer = await client.completions.create({ ...greedy, prompt: "Once upon a time", max_tokens: 8 });
  assert.equal(answer.usage.completion_tokens, 8);
});

test("stream and its usage", async () => {
  let text = "";
  let usage;
  for await (const chunk of await ask(c.SUM, { stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, c.SUM_ANSWER);
  assert.ok(usage.completion_tokens > 5);
});

test("abort in mid-stream", async () => {
  const stream = await ask(c.STORY, { stream: true, max_tokens: 1500 });
  for await (const _ of stream) stream.controller.abort();
  assert.equal((await ask(c.SUM)).choices[0].message.content, c.SUM_ANSWER);
});

test("parse; its message goes back into the history", async () => {
  const messages = [c.user(c.EXTRACT)];
  const response_format = zodResponseFormat(Person, "person");
  const first = await client.chat.completions.parse({ ...greedy, messages, response_format });
  const { message } = first.choices[0];
  assert.deepEqual(message.parsed, c.PERSON);
  const second = await client.chat.completions.create({ ...greedy, messages: [...messages, message, c.user(c.SUM)] });
  assert.equal(second.choices[0].message.content, c.SUM_ANSWER);
});

test("a parsed call goes back into the history", async () => {
  const messages = [c.user(c.WEATHER_QUESTION)];
  const tools = [weatherTool];
  const first = await client.chat.completions.parse({ ...greedy, messages, tools });
  const { message } = first.choices[0];
  assert.deepEqual(message.tool_calls[0].function.parsed_arguments, c.WEATHER_CALL);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: JSON.stringify(c.WEATHER_RESULT) };
  const second = await client.chat.completions.parse({ ...greedy, messages: [...messages, message, result], tools });
  assert.equal(second.choices[0].message.content, c.WEATHER_ANSWER);
});

test("the stream helper; its message goes back into the history", async () => {
  const messages = [c.user(c.EXTRACT)];
  const response_format = zodResponseFormat(Person, "person");
  const stream = client.chat.completions.stream({ ...greedy, messages, response_format });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  assert.deepEqual(message.parsed, c.PERSON);
  const second = await client.chat.completions.create({ ...greedy, messages: [...messages, message, c.user(c.SUM)] });
  assert.equal(second.choices[0].message.content, c.SUM_ANSWER);
});

test("runTools, plain and streamed", async () => {
  const tool = {
    type: "function",
    function: {
      name: "get_weather",
      description: c.WEATHER_DESCRIPTION,
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      parse: JSON.parse,
      function: ({ city }) => (city === "Oslo" ? c.WEATHER_RESULT : { error: "unknown city" }),
    },
  };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({
      ...greedy,
      stream,
      messages: [c.user(c.WEATHER_QUESTION)],
      tools: [tool],
    });
    assert.equal(await runner.finalContent(), c.WEATHER_ANSWER);
  }
});

test("a strict tool and an output format give a call or the format", async () => {
  const more = { tools: [weatherTool], response_format: zodResponseFormat(Person, "person") };
  const answer = await ask(c.WEATHER_QUESTION, more);
  assert.deepEqual(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments), c.WEATHER_CALL);
});

test("a zod record in a required tool", async () => {
  // what z.toJSONSchema writes for z.record(z.string(), z.string())
  const pairs = z.toJSONSchema(z.object({ pairs: z.record(z.string(), z.string()) }));
  const tool = { type: "function", function: { name: "set_pairs", parameters: pairs } };
  const answer = await ask(c.SUM, { tools: [tool], tool_choice: "required", max_tokens: 300 });
  assert.ok(answer.choices[0].message.tool_calls.length);
});

test("fixed max_tokens while the conversation grows", async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages: c.longHistory(), max_tokens: 2000 });
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("malformed arguments in the history", async () => {
  const call = { id: "call_1", type: "function", function: { name: "get_weather", arguments: "{oops" } };
  const messages = [
    c.user(c.WEATHER_QUESTION),
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: "call_1", content: "error: no JSON" },
    c.user(c.WEATHER_QUESTION),
  ];
  await client.chat.completions.create({ ...greedy, messages, tools: [weatherTool] });
});

test("values and fields that OpenAI takes", async () => {
  const more = { store: true, verbosity: "low", service_tier: "flex", prompt_cache_retention: "24h", metadata: { a: "b" } };
  assert.equal((await ask(c.SUM, more)).choices[0].message.content, c.SUM_ANSWER);
});

test("context overflow", async () => {
  await assert.rejects(ask(c.TOO_LONG), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "context_length_exceeded");
    assert.match(error.message, /This model's maximum context length is 2048 tokens/);
    return true;
  });
});

test("wrong key", async () => {
  const other = new OpenAI({ baseURL: c.BASE_URL, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(other.chat.completions.create({ ...greedy, messages: [c.user(c.SUM)] }), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError);
    assert.match(error.message, /Incorrect API key provided/);
    return true;
  });
});

test("timeout of the client", async () => {
  const slow = { ...greedy, messages: [c.user(c.STORY)], max_tokens: 1500, ignore_eos: true };
  await assert.rejects(client.chat.completions.create(slow, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
});
