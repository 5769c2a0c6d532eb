"""langchain-anthropic with langgraph's agent."""

from common import (
    KEY,
    MODEL,
    QUESTION,
    REAL_ROOT,
    SCRIPTED_ROOT,
    Weather,
    check_loop,
    check_weather,
    weather,
)
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic

options = {"model": MODEL, "api_key": KEY, "max_retries": 0}
real = ChatAnthropic(base_url=REAL_ROOT, **options)
check_weather(real.with_structured_output(Weather).invoke(QUESTION))

asked = {"messages": [{"role": "user", "content": QUESTION}]}
for streaming in (False, True):
    scripted = ChatAnthropic(base_url=SCRIPTED_ROOT, streaming=streaming, **options)
    check_loop(create_agent(scripted, [weather]).invoke(asked)["messages"][-1].text)
