// The example tools that a chat may offer. The page computes their results.

// The bundled model was not trained with tools. Arguments with few values keep its calls short.
const PLACES = {
  Lima: { zone: "America/Lima", celsius: 19 },
  Oslo: { zone: "Europe/Oslo", celsius: 4 },
  Tokyo: { zone: "Asia/Tokyo", celsius: 15 },
};
const CITY = { type: "string", enum: Object.keys(PLACES) };
const PARAMETERS = {
  get_weather: { city: CITY, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
  get_time: { city: CITY },
};

export const TOOLS = Object.entries(PARAMETERS).map(([name, properties]) => ({
  type: "function",
  function: {
    name,
    parameters: {
      type: "object",
      properties,
      required: Object.keys(properties),
      additionalProperties: false,
    },
  },
}));

/** The result of a call as JSON, or why there is none. The weather is made up. */
export function resultOf({ name, arguments: given }) {
  let city, unit;
  try {
    ({ city, unit } = JSON.parse(given));
  } catch {
    return JSON.stringify({ error: "the arguments are no JSON" });
  }
  if (!Object.hasOwn(PARAMETERS, name)) return JSON.stringify({ error: "there is no such tool" });
  if (!Object.hasOwn(PLACES, city)) return JSON.stringify({ error: "there is no such city" });
  const { zone, celsius } = PLACES[city];
  if (name === "get_time") {
    return JSON.stringify({ city, time: new Date().toLocaleTimeString("en", { timeZone: zone }) });
  }
  const temperature = unit === "fahrenheit" ? 32 + celsius * 9 / 5 : celsius;
  return JSON.stringify({ city, temperature, unit });
}
