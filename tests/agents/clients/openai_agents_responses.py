"""openai-agents with its default settings, through the Responses API."""

import asyncio

import openai
from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from common import KEY, MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather

set_tracing_disabled(True)


async def main() -> None:
    set_default_openai_client(openai.AsyncOpenAI(base_url=REAL, api_key=KEY))
    structured = Agent("weather", model=MODEL, output_type=Weather)
    check_weather((await Runner.run(structured, QUESTION)).final_output)


async def loop() -> None:
    set_default_openai_client(openai.AsyncOpenAI(base_url=SCRIPTED, api_key=KEY))
    agent = Agent("weather", model=MODEL, tools=[function_tool(weather)])
    check_loop((await Runner.run(agent, QUESTION)).final_output)
    streamed = Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "run_item_stream_event" in kinds, kinds
    check_loop(streamed.final_output)


asyncio.run(main())
asyncio.run(loop())
