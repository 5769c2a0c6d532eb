"""The package anthropic: messages, streams, forced tools, its tool runner."""

from typing import Any

import anthropic
from common import (
    CUT_OFF,
    FEW_TOKENS,
    KEY,
    LONG_TEXT,
    MODEL,
    QUESTION,
    REAL_ROOT,
    SCRIPTED_ROOT,
    Weather,
    check_loop,
    check_weather,
    weather,
)

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
real = anthropic.Anthropic(base_url=REAL_ROOT, api_key=KEY, max_retries=0)
with real.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=FEW_TOKENS) as stream:
    text = "".join(stream.text_stream)
assert text
print("streamed:", text)
count = real.messages.count_tokens(model=MODEL, messages=MESSAGES)
assert count.input_tokens > 5, count

tool: Any = {"name": "record", "input_schema": Weather.model_json_schema()}
forced = real.messages.create(
    model=MODEL,
    messages=MESSAGES,
    max_tokens=512,
    tools=[tool],
    tool_choice={"type": "tool", "name": "record"},
)
[block] = [block for block in forced.content if block.type == "tool_use"]
check_weather(Weather.model_validate(block.input))

scripted = anthropic.Anthropic(base_url=SCRIPTED_ROOT, api_key=KEY, max_retries=0)
for stream in (False, True):
    runner: Any = scripted.beta.messages.tool_runner(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=512,
        tools=[anthropic.beta_tool(weather)],
        stream=stream,
    )
    check_loop(runner.until_done().content[-1].text)

# A call that `max_tokens` cut off is sent back unchanged, even if it was streamed.
note: Any = {
    "name": "note",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": LONG_TEXT}},
        "required": ["text"],
    },
}
asked: Any = {"model": MODEL, "tools": [note], "max_tokens": FEW_TOKENS}
call: Any = {"messages": MESSAGES, "tool_choice": {"type": "any"}, **asked}
with real.messages.stream(**call) as cut_stream:
    streamed = cut_stream.get_final_message()
for cut in (real.messages.create(**call), streamed):
    assert cut.stop_reason == "max_tokens", cut
    [cut_call] = [each for each in cut.content if each.type == "tool_use"]
    print("cut off:", cut_call.input)
    told: Any = {"type": "tool_result", "tool_use_id": cut_call.id, "content": CUT_OFF}
    said: Any = {"role": "assistant", "content": cut.content}
    turns = [*MESSAGES, said, {"role": "user", "content": [told]}]
    assert real.messages.create(messages=turns, **asked).usage.output_tokens
