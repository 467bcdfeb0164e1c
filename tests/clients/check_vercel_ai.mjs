// The Vercel AI SDK against a server with three providers: openai (Responses), openai-compatible, and anthropic.
//
// Run by node in a folder that has the packages: `node check_vercel_ai.mjs http://127.0.0.1:8000`. It prints the same
// lines as features.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const packages = createRequire(pathToFileURL(`${process.cwd()}/package.json`)); // the packages are in the working directory
const load = async (name) => import(pathToFileURL(packages.resolve(name)).href);
const { Output, generateText, isStepCount, stepCountIs, streamText, tool } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const url = process.argv[2];
const cities = ["Paris", "Rome"];
const prompt = "What is the weather in Paris?";
const weather = z.object({ city: z.enum(cities), is_sunny: z.boolean() });
let hasFailed = false;

async function check(client, feature, run) {
  let result = "passed";
  try {
    await run();
  } catch (error) {
    console.error(error);
    hasFailed = true;
    result = `FAILED: ${error.name}`;
  }
  console.log(`feature | ${client} | ${feature} | ${result}`);
}

async function checkProvider(client, model) {
  const common = { model, prompt, temperature: 0, maxOutputTokens: 256, maxRetries: 0 };
  const called = [];
  const tools = {
    get_weather: tool({
      description: "Return the weather of a city.",
      inputSchema: z.object({ city: z.enum(cities) }),
      execute: async ({ city }) => {
        called.push(city);
        return "sunny";
      },
    }),
  };
  // The first step must call the tool; the second one refers to its items.
  const twoSteps = {
    tools,
    stopWhen: (isStepCount ?? stepCountIs)(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  };
  await check(client, "tools", async () => {
    const result = await generateText({ ...common, ...twoSteps });
    assert.equal(result.steps.length, 2);
    assert.equal(result.steps[0].toolCalls[0].toolName, "get_weather");
    assert.ok(cities.includes(called[0]));
  });
  await check(client, "structured output", async () => {
    const { output } = await generateText({ ...common, output: Output.object({ schema: weather }) });
    weather.parse(output);
  });
  await check(client, "streaming", async () => {
    const whole = await generateText(common);
    const streamed = streamText(common);
    let text = "";
    for await (const part of streamed.textStream) text += part;
    assert.ok(text.length > 0);
    if (client !== "vercel-ai anthropic") assert.equal(text, whole.text);
    const stream = streamText({ ...common, ...twoSteps });
    await stream.consumeStream();
    assert.equal((await stream.steps).length, 2);
  });
}

const options = { baseURL: `${url}/v1`, apiKey: "none" };
await checkProvider("vercel-ai openai", createOpenAI(options)("tiny"));
await checkProvider("vercel-ai compatible", createOpenAICompatible({ ...options, name: "ramify", supportsStructuredOutputs: true })("tiny"));
await checkProvider("vercel-ai anthropic", createAnthropic(options)("tiny"));
process.exit(hasFailed ? 1 : 0);
