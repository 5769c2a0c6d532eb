"""pydantic-ai over chats: `output_type` in its default mode, and a tool."""

from common import KEY, MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

real = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=REAL, api_key=KEY))
# If calls are optional, the bundled model calls again and again until the context is full.
agent = Agent(real, output_type=Weather, model_settings={"parallel_tool_calls": False})
check_weather(agent.run_sync(QUESTION).output)

scripted = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=SCRIPTED, api_key=KEY))
check_loop(Agent(scripted, tools=[weather]).run_sync(QUESTION).output)
both = Agent(scripted, tools=[weather], output_type=Weather).run_sync(QUESTION)
check_weather(both.output)
