"""langchain-tests' standard tests of a chat model, with the bundled model."""

import os

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

NO_CALL = "the bundled model calls no tool by itself"
MANY_CALLS = "where it must call, the bundled model calls again and again"
ENDLESS = "the bundled model never ends a string"

TOO_HARD = {
    "test_agent_loop": NO_CALL,
    "test_structured_output_optional_param": ENDLESS,
    "test_tool_calling": MANY_CALLS,
    "test_tool_calling_async": MANY_CALLS,
    "test_tool_calling_with_no_arguments": MANY_CALLS,
    "test_unicode_tool_call_integration": ENDLESS,
}


class TestOutrider(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "model": "outrider",
            "base_url": os.environ["OUTRIDER_URL"],
            "api_key": "any",
            "stream_usage": True,
            "max_tokens": 256,
            "temperature": 0,
        }


for name, reason in TOO_HARD.items():
    test = getattr(TestOutrider, name)
    setattr(TestOutrider, name, pytest.mark.xfail(reason=reason, strict=True)(test))
