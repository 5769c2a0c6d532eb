"""smolagents' ToolCallingAgent, which demands a call at each step, the last answer included."""

from common import ANSWER, KEY, MODEL, QUESTION, SCRIPTED, weather
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(MODEL, api_base=SCRIPTED, api_key=KEY)
agent = ToolCallingAgent([tool(weather)], model)
for stream in (False, True):
    agent.stream_outputs = stream
    answer = agent.run(QUESTION)
    print("loop:", answer)
    assert answer == ANSWER, answer
