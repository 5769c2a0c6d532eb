"""guidance: free text and JSON by schema, over chats."""

import guidance
from common import KEY, MODEL, QUESTION, REAL, Weather, check_weather

real = guidance.models.OpenAI(MODEL, api_key=KEY, base_url=REAL)
with guidance.user():
    real += QUESTION
with guidance.assistant():
    answered = real + guidance.json("answer", schema=Weather)
check_weather(Weather.model_validate_json(answered["answer"]))
