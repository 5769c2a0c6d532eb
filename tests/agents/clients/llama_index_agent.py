"""LlamaIndex: OpenAILike, structured output by a forced tool, FunctionAgent."""

import asyncio

from common import KEY, MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike


def model(url: str) -> OpenAILike:
    return OpenAILike(
        MODEL, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True
    )


async def main() -> None:
    check_weather(model(REAL).structured_predict(Weather, PromptTemplate(QUESTION)))
    agent = FunctionAgent(tools=[weather], llm=model(SCRIPTED))
    check_loop(await agent.run(QUESTION))


asyncio.run(main())
