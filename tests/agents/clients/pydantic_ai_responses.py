"""pydantic-ai's `openai:` models, which use the Responses API, with a stream."""

import asyncio
import os

from common import MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather
from pydantic_ai import Agent

os.environ["OPENAI_BASE_URL"] = REAL
check_weather(Agent(f"openai:{MODEL}", output_type=Weather).run_sync(QUESTION).output)


async def streamed() -> str:
    async with agent.run_stream(QUESTION) as answer:
        return str(await answer.get_output())


os.environ["OPENAI_BASE_URL"] = SCRIPTED
agent = Agent(f"openai:{MODEL}", tools=[weather])
check_loop(agent.run_sync(QUESTION).output)
check_loop(asyncio.run(streamed()))
