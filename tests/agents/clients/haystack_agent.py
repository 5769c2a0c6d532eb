"""haystack's Agent with a tool, over chats, Responses and Anthropic's messages."""

import os
import sys

from common import KEY, MODEL, QUESTION, SCRIPTED, SCRIPTED_ROOT, check_loop, weather
from haystack.components.agents import Agent
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from haystack_integrations.components.generators.anthropic import AnthropicChatGenerator

os.environ["ANTHROPIC_BASE_URL"] = SCRIPTED_ROOT
key = Secret.from_token(KEY)
generators = {
    "chat": lambda: OpenAIChatGenerator(key, MODEL, api_base_url=SCRIPTED),
    "responses": lambda: OpenAIResponsesChatGenerator(
        api_key=key, model=MODEL, api_base_url=SCRIPTED
    ),
    "messages": lambda: AnthropicChatGenerator(key, MODEL),
}
agent = Agent(chat_generator=generators[sys.argv[3]](), tools=[create_tool_from_function(weather)])
for callback in (None, lambda chunk: None):
    answer = agent.run([ChatMessage.from_user(QUESTION)], streaming_callback=callback)
    check_loop(answer["messages"][-1].text)
