"""langchain-openai with langgraph's agent, structured output by schema and by tool."""

from common import KEY, MODEL, QUESTION, REAL, SCRIPTED, Weather, check_loop, check_weather, weather
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

real = ChatOpenAI(model=MODEL, base_url=REAL, api_key=KEY, max_retries=0)
check_weather(real.with_structured_output(Weather).invoke(QUESTION))
check_weather(real.with_structured_output(Weather, method="function_calling").invoke(QUESTION))

scripted = ChatOpenAI(model=MODEL, base_url=SCRIPTED, api_key=KEY, max_retries=0)
agent = create_agent(scripted, [weather])
asked = {"messages": [{"role": "user", "content": QUESTION}]}
check_loop(agent.invoke(asked)["messages"][-1].content)
steps = list(agent.stream(asked, stream_mode="values"))
check_loop(steps[-1]["messages"][-1].content)
tokens = [part for part, _ in agent.stream(asked, stream_mode="messages")]
assert len(tokens) > 5, tokens
