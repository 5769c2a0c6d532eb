"""semantic-kernel with a function that the model may call."""

import asyncio

import openai
from common import KEY, MODEL, QUESTION, SCRIPTED, check_loop, weather
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Weather:
    """A plugin."""

    @kernel_function
    def weather(self, city: str) -> str:
        """Tell the weather in a city."""
        return weather(city)


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=SCRIPTED, api_key=KEY)
    service = OpenAIChatCompletion(MODEL, async_client=client)
    agent = ChatCompletionAgent(
        kernel=Kernel(), service=service, name="weather", plugins=[Weather()]
    )
    check_loop(await agent.get_response(messages=QUESTION))
    parts = [str(part.message) async for part in agent.invoke_stream(messages=QUESTION)]
    check_loop("".join(parts))


asyncio.run(main())
