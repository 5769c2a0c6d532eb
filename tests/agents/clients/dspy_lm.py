"""dspy: signatures over chats and over Responses."""

import sys

import dspy
from common import ANSWER, KEY, MODEL, QUESTION, SCRIPTED

model = dspy.LM(
    f"openai/{MODEL}", api_base=SCRIPTED, api_key=KEY, model_type=sys.argv[3], cache=False
)
answer = model(QUESTION)
print("answer:", answer)
assert ANSWER in str(answer), answer
