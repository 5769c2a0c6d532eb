"""litellm over its providers for chats: forced and chosen tools, streams, `reasoning_effort`."""

import json
from typing import Any

import litellm
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

litellm.telemetry = False
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
record = {
    "type": "function",
    "function": {"name": "record", "parameters": Weather.model_json_schema()},
}
tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
for provider in ("openai", "hosted_vllm"):
    options: Any = {"model": f"{provider}/{MODEL}", "api_key": KEY, "num_retries": 0}
    # If calls are optional, the bundled model calls again and again until the context is full.
    forced = litellm.completion(
        messages=MESSAGES,
        api_base=REAL,
        tools=[record],
        tool_choice="required",
        parallel_tool_calls=False,
        **options,
    )
    arguments = forced.choices[0].message.tool_calls[0].function.arguments
    check_weather(Weather.model_validate_json(arguments))
    litellm.completion(
        messages=MESSAGES,
        api_base=REAL,
        reasoning_effort="low",
        max_tokens=FEW_TOKENS,
        drop_params=True,
        **options,
    )
    for stream in (False, True):
        messages = [*MESSAGES]
        while True:
            answer = litellm.completion(
                messages=messages, api_base=SCRIPTED, tools=[tool], stream=stream, **options
            )
            if stream:
                answer = litellm.stream_chunk_builder(list(answer))
            choice = answer.choices[0]
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        check_loop(choice.message.content)
