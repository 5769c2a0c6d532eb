// The AI SDK with one of its providers: objects, forced and chosen tools, streams.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import * as common from "./common.mjs";

const apiKey = common.KEY;
const providers = {
  // Without this setting, the SDK asks for any JSON, and hopes that the model keeps to the schema.
  compatible: (baseURL) =>
    createOpenAICompatible({ name: "outrider", baseURL, apiKey, supportsStructuredOutputs: true }),
  responses: (baseURL) => createOpenAI({ baseURL, apiKey }),
  chat: (baseURL) => createOpenAI({ baseURL, apiKey }).chat,
  messages: (baseURL) => createAnthropic({ baseURL, apiKey }),
};
const provider = providers[process.argv[4]];
const prompt = common.QUESTION;
const maxRetries = 0;

const real = provider(common.REAL)(common.MODEL);
const parsed = await generateText({
  model: real,
  prompt,
  maxRetries,
  output: Output.object({ schema: common.Weather }),
});
common.checkWeather(parsed.output);
const forced = await generateText({
  model: real,
  prompt,
  maxRetries,
  tools: { record: tool({ inputSchema: common.Weather }) },
  toolChoice: { type: "tool", toolName: "record" },
});
common.checkWeather(forced.toolCalls[0].input);

const asked = {
  model: provider(common.SCRIPTED)(common.MODEL),
  prompt,
  maxRetries,
  stopWhen: stepCountIs(3),
  tools: {
    weather: tool({
      description: "Tell the weather in a city.",
      inputSchema: common.Place,
      execute: common.weather,
    }),
  },
};
common.checkLoop((await generateText(asked)).text);
common.checkLoop(await streamText(asked).text);
