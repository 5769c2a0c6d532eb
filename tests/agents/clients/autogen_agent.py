"""autogen's AssistantAgent with a tool."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import KEY, MODEL, QUESTION, SCRIPTED, check_loop, weather


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=SCRIPTED,
        api_key=KEY,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": ModelFamily.UNKNOWN,
        },
    )
    for stream in (False, True):
        agent = AssistantAgent(
            "weather",
            client,
            tools=[weather],
            reflect_on_tool_use=True,
            model_client_stream=stream,
        )
        answer = await agent.run(task=QUESTION)
        check_loop(answer.messages[-1].content)
    await client.close()


asyncio.run(main())
