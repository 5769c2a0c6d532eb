"""litellm's `responses` and its bridge from Anthropic's messages, both over Responses."""

import asyncio
from typing import Any

import litellm
from common import ANSWER, KEY, MODEL, QUESTION, SCRIPTED

options: Any = {"model": f"openai/{MODEL}", "api_base": SCRIPTED, "api_key": KEY}
answer = litellm.responses(input=QUESTION, **options)
text = answer.output[-1].content[0].text
print("responses:", text)
assert text == ANSWER, answer
kinds = [event.type for event in litellm.responses(input=QUESTION, stream=True, **options)]
assert kinds[-1] == "response.completed", kinds

bridged: Any = asyncio.run(
    litellm.anthropic.messages.acreate(
        messages=[{"role": "user", "content": QUESTION}], max_tokens=64, **options
    )
)
print("messages:", bridged)
assert bridged["content"][-1]["text"] == ANSWER, bridged
