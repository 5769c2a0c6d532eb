"""The package openai: chat, streams, `parse`, tools."""

import json
from typing import Any

import openai
from common import (
    CUT_OFF,
    FEW_TOKENS,
    KEY,
    LONG_TEXT,
    MODEL,
    QUESTION,
    REAL,
    SCRIPTED,
    Weather,
    check_loop,
    check_weather,
    weather,
)

TOOLS: Any = [openai.pydantic_function_tool(Weather)]
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
real = openai.OpenAI(base_url=REAL, api_key=KEY, max_retries=0)

parsed = real.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather)
check_weather(parsed.choices[0].message.parsed)

# If calls are optional, the bundled model calls again and again until the context is full.
forced = real.chat.completions.parse(
    model=MODEL,
    messages=MESSAGES,
    tools=TOOLS,
    tool_choice="required",
    parallel_tool_calls=False,
)
calls = forced.choices[0].message.tool_calls
assert calls
check_weather(calls[0].function.parsed_arguments)

with real.chat.completions.stream(
    model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_completion()
assert "tool_calls.function.arguments.delta" in kinds, kinds
assert "tool_calls.function.arguments.done" in kinds, kinds
assert final.choices[0].message.tool_calls
check_weather(final.choices[0].message.tool_calls[0].function.parsed_arguments)

scripted = openai.OpenAI(base_url=SCRIPTED, api_key=KEY, max_retries=0)
tool: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
messages = [*MESSAGES]
while True:
    message = scripted.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    choice = message.choices[0]
    messages.append(choice.message)
    if choice.finish_reason != "tool_calls":
        break
    for call in choice.message.tool_calls or ():
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
check_loop(choice.message.content)

# A call that `max_tokens` cuts off is sent back unchanged.
note: Any = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": LONG_TEXT}},
            "required": ["text"],
        },
    },
}
cut = real.chat.completions.create(
    model=MODEL, messages=MESSAGES, tools=[note], tool_choice="required", max_tokens=FEW_TOKENS
).choices[0]
assert cut.finish_reason == "length", cut
assert cut.message.tool_calls
cut_call: Any = cut.message.tool_calls[0]
print("cut off:", cut_call.function.arguments)
told: Any = {"role": "tool", "tool_call_id": cut_call.id, "content": CUT_OFF}
again = real.chat.completions.create(
    model=MODEL,
    messages=[*MESSAGES, cut.message, told, *MESSAGES],
    tools=[note],
    max_tokens=FEW_TOKENS,
)
assert again.usage
assert again.usage.completion_tokens
