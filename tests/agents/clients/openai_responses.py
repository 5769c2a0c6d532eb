"""The package openai: the Responses API, with and without streams."""

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

# An answer with a call that `max_output_tokens` cut off is sent back unchanged, or named by its id.
note: Any = {
    "type": "function",
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": LONG_TEXT}},
        "required": ["text"],
    },
}
asked: Any = {"model": MODEL, "tools": [note], "max_output_tokens": FEW_TOKENS}
cut = real.responses.create(input=QUESTION, tool_choice="required", **asked)
assert cut.status == "incomplete", cut
[cut_call] = [item for item in cut.output if item.type == "function_call"]
print("cut off:", cut_call.arguments)
told: Any = {"type": "function_call_output", "call_id": cut_call.call_id, "output": CUT_OFF}
first: Any = {"role": "user", "content": QUESTION}
by_items = real.responses.create(input=[first, *cut.output, told, first], **asked)
by_id = real.responses.create(input=[told, first], previous_response_id=cut.id, **asked)
assert by_items.usage
assert by_id.usage
assert by_items.usage.input_tokens == by_id.usage.input_tokens

# The client reads the input and the events of an answer that the gateway has kept.
items = [item.type for item in real.responses.input_items.list(by_id.id, order="asc")]
assert items == ["message", "function_call", "function_call_output", "message"], items
counted = real.responses.input_tokens.count(input=QUESTION, model=MODEL)
assert 5 < counted.input_tokens < by_id.usage.input_tokens, counted
events = [event.type for event in real.responses.retrieve(by_id.id, stream=True)]
assert events[0] == "response.created", events
try:
    real.responses.cancel(by_id.id)
except openai.BadRequestError as refused:
    print("refused:", refused)
else:
    raise AssertionError("a complete response was cancelled")
