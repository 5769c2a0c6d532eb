"""What the scripts share: the gateways' addresses, a tool, a type for structured answers.

A script gets the URLs of two gateways: one has the bundled model, the other a scripted model.
"""

import os
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict

REAL, SCRIPTED = (f"{url}/v1" for url in sys.argv[1:3])
REAL_ROOT, SCRIPTED_ROOT = sys.argv[1:3]
MODEL = "outrider"
KEY = "any"
QUESTION = "What is the weather in Oslo?"
ANSWER = "It is 21 degrees in Oslo."
# The bundled model's answers have no natural end.
FEW_TOKENS = 32
# A call whose text has this many characters does not end within FEW_TOKENS.
LONG_TEXT = 1000
CUT_OFF = "The call was cut off."

# Several libraries make a client, which needs a key, when they are imported.
os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = KEY


class Weather(BaseModel):
    """The weather in short.

    The type has no free text and no further fields, since the bundled model would end neither.
    """

    model_config = ConfigDict(extra="forbid")

    sky: Literal["clear", "cloudy"]
    windy: bool


_cities: list[str] = []


def weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The city's name.
    """
    _cities.append(city)
    return f"21 degrees in {city}"


def check_loop(answer: object) -> None:
    """Check that the model called the tool once, and that its last answer came back."""
    print("loop:", answer)
    assert _cities == ["Oslo"], _cities
    assert str(answer).strip() == ANSWER, answer
    _cities.clear()


def check_weather(answered: object) -> None:
    """Check that the answer is of the demanded type."""
    print("structured:", answered)
    assert isinstance(answered, Weather), answered
