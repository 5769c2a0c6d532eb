// The package openai: `parse`, streams, `runTools`.

import assert from "node:assert";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import * as common from "./common.mjs";

const messages = [{ role: "user", content: common.QUESTION }];
const { MODEL: model, KEY: apiKey } = common;
const real = new OpenAI({ baseURL: common.REAL, apiKey, maxRetries: 0 });
const parsed = await real.chat.completions.parse({
  model,
  messages,
  response_format: zodResponseFormat(common.Weather, "weather"),
});
common.checkWeather(parsed.choices[0].message.parsed);

const forced = real.chat.completions.stream({
  model,
  messages,
  tools: [zodFunction({ name: "record", parameters: common.Weather })],
  tool_choice: { type: "function", function: { name: "record" } },
});
const [call] = (await forced.finalMessage()).tool_calls;
common.checkWeather(call.function.parsed_arguments);

const scripted = new OpenAI({ baseURL: common.SCRIPTED, apiKey, maxRetries: 0 });
const tool = zodFunction({
  name: "weather",
  parameters: common.Place,
  function: common.weather,
  description: "Tell the weather in a city.",
});
for (const stream of [false, true]) {
  const runner = scripted.chat.completions.runTools({ model, messages, stream, tools: [tool] });
  common.checkLoop(await runner.finalContent());
}

// A call that `max_tokens` cut off is sent back as it came.
const note = {
  type: "function",
  function: {
    name: "note",
    parameters: {
      type: "object",
      properties: { text: { type: "string", minLength: common.LONG_TEXT } },
      required: ["text"],
    },
  },
};
const asked = { model, tools: [note], max_tokens: common.FEW_TOKENS };
const cut = await real.chat.completions.create({ messages, tool_choice: "required", ...asked });
assert.equal(cut.choices[0].finish_reason, "length");
const { message } = cut.choices[0];
console.log("cut off:", message.tool_calls[0].function.arguments);
const told = { role: "tool", tool_call_id: message.tool_calls[0].id, content: common.CUT_OFF };
const history = [...messages, message, told, ...messages];
const again = await real.chat.completions.create({ messages: history, ...asked });
assert.ok(again.usage.completion_tokens > 0);
