// The package @anthropic-ai/sdk: messages, streams, forced tools, its tool runner.

import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import * as common from "./common.mjs";

const messages = [{ role: "user", content: common.QUESTION }];
const { MODEL: model, KEY: apiKey } = common;
const real = new Anthropic({ baseURL: common.REAL_ROOT, apiKey, maxRetries: 0 });
const stream = real.messages.stream({ model, messages, max_tokens: common.FEW_TOKENS });
assert((await stream.finalText()).length > 0);
const forced = await real.messages.create({
  model,
  messages,
  max_tokens: 512,
  tools: [{ name: "record", input_schema: z.toJSONSchema(common.Weather) }],
  tool_choice: { type: "tool", name: "record" },
});
common.checkWeather(forced.content.find((block) => block.type === "tool_use").input);

const scripted = new Anthropic({ baseURL: common.SCRIPTED_ROOT, apiKey, maxRetries: 0 });
const tool = betaZodTool({
  name: "weather",
  description: "Tell the weather in a city.",
  inputSchema: common.Place,
  run: common.weather,
});
const runner = scripted.beta.messages.toolRunner({
  model,
  messages,
  max_tokens: 512,
  tools: [tool],
});
common.checkLoop((await runner).content.at(-1).text);
