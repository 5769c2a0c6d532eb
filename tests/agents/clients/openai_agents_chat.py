"""openai-agents with its class for chats: `output_type`, a tool, a stream."""

import asyncio

import openai
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from common import KEY, MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather

set_tracing_disabled(True)


def model(url: str) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI(base_url=url, api_key=KEY))


async def main() -> None:
    structured = Agent("weather", model=model(REAL), output_type=Weather)
    check_weather((await Runner.run(structured, QUESTION)).final_output)
    agent = Agent("weather", model=model(SCRIPTED), tools=[function_tool(weather)])
    check_loop((await Runner.run(agent, QUESTION)).final_output)
    streamed = Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "run_item_stream_event" in kinds, kinds
    check_loop(streamed.final_output)


asyncio.run(main())
