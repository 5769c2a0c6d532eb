"""pydantic-ai's `anthropic:` models."""

import os

from common import (
    MODEL,
    QUESTION,
    REAL_ROOT,
    SCRIPTED_ROOT,
    Weather,
    check_loop,
    check_weather,
    weather,
)
from pydantic_ai import Agent

os.environ["ANTHROPIC_BASE_URL"] = REAL_ROOT
check_weather(Agent(f"anthropic:{MODEL}", output_type=Weather).run_sync(QUESTION).output)

os.environ["ANTHROPIC_BASE_URL"] = SCRIPTED_ROOT
check_loop(Agent(f"anthropic:{MODEL}", tools=[weather]).run_sync(QUESTION).output)
