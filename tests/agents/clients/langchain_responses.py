"""langchain-openai through the Responses API."""

from common import KEY, MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

options = {"model": MODEL, "api_key": KEY, "use_responses_api": True, "max_retries": 0}
real = ChatOpenAI(base_url=REAL, **options)
check_weather(real.with_structured_output(Weather).invoke(QUESTION))

asked = {"messages": [{"role": "user", "content": QUESTION}]}
for streaming in (False, True):
    scripted = ChatOpenAI(base_url=SCRIPTED, streaming=streaming, **options)
    check_loop(create_agent(scripted, [weather]).invoke(asked)["messages"][-1].text)
