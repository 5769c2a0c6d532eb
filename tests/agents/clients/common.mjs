// What the scripts share; common.py says more.

import assert from "node:assert";
import { z } from "zod";

export const [REAL_ROOT, SCRIPTED_ROOT] = process.argv.slice(2, 4);
export const [REAL, SCRIPTED] = [`${REAL_ROOT}/v1`, `${SCRIPTED_ROOT}/v1`];
export const MODEL = "outrider";
export const KEY = "any";
export const QUESTION = "What is the weather in Oslo?";
export const ANSWER = "It is 21 degrees in Oslo.";
// The bundled model's answers have no natural end.
export const FEW_TOKENS = 32;
// A call whose text has this many characters does not end within FEW_TOKENS.
export const LONG_TEXT = 1000;
export const CUT_OFF = "The call was cut off.";

process.env.OPENAI_API_KEY = process.env.ANTHROPIC_API_KEY = KEY;

// The type has no free text, since the bundled model would never end it.
export const Weather = z.object({ sky: z.enum(["clear", "cloudy"]), windy: z.boolean() });
export const Place = z.object({ city: z.string() });

const cities = [];

/** Does the tool's work. */
export function weather({ city }) {
  cities.push(city);
  return `21 degrees in ${city}`;
}

/** Checks that the model called the tool once, and that its last answer came back. */
export function checkLoop(answer) {
  console.log("loop:", answer);
  assert.deepEqual(cities.splice(0), ["Oslo"]);
  assert.equal(answer.trim(), ANSWER);
}

/** Checks that the answer is of the demanded type. */
export function checkWeather(answer) {
  console.log("structured:", answer);
  Weather.parse(answer);
}
