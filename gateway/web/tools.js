// The example tools that a chat may offer. They show calls; nobody runs them.

// The bundled model was not trained with tools. Arguments that are choices keep its calls short.
const CITY = { type: "string", enum: ["Lima", "Oslo", "Tokyo"] };
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
