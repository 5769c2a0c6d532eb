// The package @openai/agents, over chats or over Responses.

import assert from "node:assert";
import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from "@openai/agents";
import * as common from "./common.mjs";

setTracingDisabled(true);
const { MODEL: model, KEY: apiKey, QUESTION } = common;
const name = "weather";

function runner(baseURL) {
  const useResponses = process.argv[4] === "responses";
  return new Runner({ modelProvider: new OpenAIProvider({ apiKey, baseURL, useResponses }) });
}

const structured = new Agent({ name, model, outputType: common.Weather });
common.checkWeather((await runner(common.REAL).run(structured, QUESTION)).finalOutput);

const description = "Tell the weather in a city.";
const tools = [tool({ name, description, parameters: common.Place, execute: common.weather })];
const agent = new Agent({ name, model, tools });
const scripted = runner(common.SCRIPTED);
common.checkLoop((await scripted.run(agent, QUESTION)).finalOutput);
const streamed = await scripted.run(agent, QUESTION, { stream: true });
for await (const event of streamed) assert(event.type);
common.checkLoop(streamed.finalOutput);
