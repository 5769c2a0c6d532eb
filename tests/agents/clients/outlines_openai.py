"""outlines over its class for OpenAI's API."""

import openai
import outlines
from common import KEY, MODEL, QUESTION, REAL, Weather, check_weather

model = outlines.from_openai(openai.OpenAI(base_url=REAL, api_key=KEY), MODEL)
check_weather(Weather.model_validate_json(model(QUESTION, Weather)))
