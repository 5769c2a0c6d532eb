"""instructor in its default mode, which forces a tool."""

import instructor
import openai
from common import KEY, MODEL, QUESTION, REAL, Weather, check_weather

client = instructor.from_openai(openai.OpenAI(base_url=REAL, api_key=KEY, max_retries=0))
messages = [{"role": "user", "content": QUESTION}]
asked = {"model": MODEL, "messages": messages, "response_model": Weather, "max_retries": 0}
check_weather(client.chat.completions.create(**asked))
parts = list(client.chat.completions.create_partial(**asked))
check_weather(Weather.model_validate(parts[-1].model_dump()))
