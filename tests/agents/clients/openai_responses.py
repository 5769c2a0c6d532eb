"""The package openai: the Responses API, with and without streams."""

import json
from typing import Any

import openai
from common import (
    FEW_TOKENS,
    KEY,
    MODEL,
    QUESTION,
    REAL,
    SCRIPTED,
    Weather,
    check_loop,
    check_weather,
    weather,
)

real = openai.OpenAI(base_url=REAL, api_key=KEY, max_retries=0)
check_weather(real.responses.parse(model=MODEL, input=QUESTION, text_format=Weather).output_parsed)
with real.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=FEW_TOKENS) as stream:
    kinds = [event.type for event in stream]
assert kinds[0] == "response.created", kinds
assert "response.output_text.delta" in kinds, kinds

scripted = openai.OpenAI(base_url=SCRIPTED, api_key=KEY, max_retries=0)
tool: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
answer = scripted.responses.create(model=MODEL, input=QUESTION, tools=[tool])
[call] = [item for item in answer.output if item.type == "function_call"]
result: Any = {
    "type": "function_call_output",
    "call_id": call.call_id,
    "output": weather(**json.loads(call.arguments)),
}
last = scripted.responses.create(
    model=MODEL, input=[result], tools=[tool], previous_response_id=answer.id
)
check_loop(last.output_text)
