// The package openai: the Responses API.

import assert from "node:assert";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import * as common from "./common.mjs";

const { MODEL: model, KEY: apiKey, QUESTION: input } = common;
const real = new OpenAI({ baseURL: common.REAL, apiKey, maxRetries: 0 });
const parsed = await real.responses.parse({
  model,
  input,
  text: { format: zodTextFormat(common.Weather, "weather") },
});
common.checkWeather(parsed.output_parsed);

const scripted = new OpenAI({ baseURL: common.SCRIPTED, apiKey, maxRetries: 0 });
const answer = await scripted.responses.stream({ model, input }).finalResponse();
assert.equal(answer.output_text, common.ANSWER);
