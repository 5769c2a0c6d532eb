"""What a chat's answer may hold beside content: its grammar, and how to read it."""

from __future__ import annotations

from dataclasses import replace

from gateway.http.schema import ChatBody
from gateway.text.request import Prompt, TextRequest
from gateway.tools.definitions import ToolChoice, ToolUse, tool_use
from gateway.tools.formats import JSON_FORMAT, AnswerFormat, Thought, ToolFormat
from gateway.tools.grammar import ThoughtState, calls_grammar
from gateway.tools.reader import Reading
from outrider.errors import OutriderError, Reason


def with_tools(
    request: TextRequest, body: ChatBody, prompt: Prompt, answers: AnswerFormat
) -> TextRequest:
    """The request with the grammar of its calls, and with how to read its answer.

    Raises OutriderError that names `tools` or `tool_choice`: INVALID_VALUE if they contradict each
    other, UNSUPPORTED_PARAMETER if nobody knows how the model writes calls.
    """
    thought = None if body.separate_reasoning is False else answers.thought
    state = _state(thought, prompt.end)
    use = tool_use(
        [tool.tool for tool in body.tools or ()],
        body.tool_choice or ToolChoice("auto"),
        is_parallel=body.parallel_tool_calls is not False,
    )
    begins_in_thought = thought is not None and state == "open"
    grammar = request.tokens.grammar
    if use is None:
        # A grammar holds from the first token, so its text is content.
        if thought is None or state == "over" or grammar is not None:
            return request
        reading = Reading(
            thought=thought,
            begins_in_thought=begins_in_thought,
            shows_thought=body.include_reasoning is not False,
        )
        return replace(request, reading=reading)
    form = _form(answers.calls, use)
    reading = Reading(
        form,
        {tool.name: tool.parameters or {} for tool in use.tools},
        None if state == "over" else thought,
        begins_in_thought,
        shows_thought=body.include_reasoning is not False,
        is_forced=use.is_forced,
    )
    tokens = replace(request.tokens, grammar=calls_grammar(form, use, thought, state, grammar))
    return replace(request, tokens=tokens, reading=reading, grammar_field="tools")


def _state(thought: Thought | None, end: str) -> ThoughtState:
    if thought is None or thought.is_over(end):
        return "over"
    return "open" if thought.is_open(end) else "possible"


def _form(known: ToolFormat | None, use: ToolUse) -> ToolFormat:
    if known is not None:
        return known
    if use.is_forced:
        return JSON_FORMAT
    message = (
        "tool_choice auto is not supported: the chat template shows no known format of calls; "
        "start the gateway with --tool-format, or force a call with tool_choice required"
    )
    raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, "tool_choice")
