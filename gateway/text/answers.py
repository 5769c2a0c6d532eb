"""Decides what an answer may hold besides content: sets its grammar and its `reading`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.text.request import Prompt, TextRequest
from gateway.tools.definitions import AUTO, Tool, ToolChoice, ToolUse, tool_use
from gateway.tools.formats import JSON_FORMAT, AnswerFormat, ToolFormat
from gateway.tools.grammar import calls_grammar
from gateway.tools.reader import Reading
from gateway.tools.thoughts import Thought, ThoughtState
from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar.kinds import FreeThought, Grammar


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """A chat's settings for its answer's calls and thought."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = AUTO
    is_parallel: bool = True
    """True if the answer may hold several calls."""
    splits_thought: bool = True
    """True if the thought is separate from the content."""
    shows_thought: bool = True
    """True if the answer includes a separate thought."""
    thinks: bool = True
    """False if the chat asks for no thought."""
    binds_thought: bool = False
    """True if a grammar binds the answer from the first token, so that there is no thought."""
    continued: str = ""
    """The text of the last message, if the answer continues that message; else empty."""
    tools_field: str = "tools"
    choice_field: str = "tool_choice"
    """`tools_field` and `choice_field` are the caller's names of tools and choice, for errors."""


def asks_for_thought(variables: Mapping[str, Any]) -> bool:
    """Return whether the variables of a chat template allow a thought."""
    # Templates name the switch either enable_thinking or thinking.
    return all(variables.get(name) is not False for name in ("enable_thinking", "thinking"))


def with_calls_and_thought(
    request: TextRequest, options: AnswerOptions, prompt: Prompt, answers: AnswerFormat
) -> TextRequest:
    """Return the request with a grammar of calls and thought, and with `reading` for its answer.

    Raises OutriderError that names the tools or the choice: INVALID_VALUE if they contradict each
    other, UNSUPPORTED_PARAMETER if the format of the model's calls is unknown.
    """
    use = _use(options)
    grammar = request.tokens.grammar
    if use is None and grammar is not None:
        return _behind_thought(request, grammar, options, prompt, answers.thought)
    thought = answers.thought if options.splits_thought else None
    state = _state(thought, prompt, options, is_bound=grammar is not None or _is_forced(use))
    if use is None and state == "over":
        return request
    form = None if use is None else _form(answers.calls, use, options.choice_field)
    reading = Reading(
        form,
        {} if use is None else {tool.name: tool.parameters or {} for tool in use.tools},
        None if state == "over" else thought,
        begins_in_thought=state == "open",
        shows_thought=options.shows_thought,
        is_either=use is not None and not use.is_forced and grammar is not None,
        is_forced=_is_forced(use),
        held=frozenset(tool.name for tool in options.tools if tool.strict),
        first_call=prompt.call_count,
    )
    if form is None or use is None:
        return replace(request, reading=reading)
    field = options.tools_field
    made = calls_grammar(form, use, thought, state, grammar, field)
    tokens = replace(request.tokens, grammar=made)
    return replace(request, tokens=tokens, reading=reading, grammar_field=field)


def _use(options: AnswerOptions) -> ToolUse | None:
    """Return the tools that the answer may call; None if it may call no tool.

    Raises OutriderError(INVALID_VALUE).
    """
    if options.choice.mode == "required" and not options.tools:
        problem = f"demands a call, so {options.tools_field} must hold at least 1 tool"
        raise invalid(options.choice_field, problem)
    known = {tool.name for tool in options.tools}
    if len(known) < len(options.tools):
        raise invalid(options.tools_field, "must not hold two tools of one name")
    for name in sorted(options.choice.names or ()):
        if name not in known:
            problem = f"names {name[:100]!r}, which is none of {options.tools_field}"
            raise invalid(options.choice_field, problem)
    return tool_use(options.tools, options.choice, is_parallel=options.is_parallel)


def _is_forced(use: ToolUse | None) -> bool:
    return use is not None and use.is_forced


def _behind_thought(
    request: TextRequest,
    grammar: Grammar,
    options: AnswerOptions,
    prompt: Prompt,
    thought: Thought | None,
) -> TextRequest:
    """Return the request with `reading`, and let its grammar allow a free thought first."""
    state = _state(thought, prompt, options, is_bound=True)
    if thought is None or state == "over" or grammar.thought is not None:
        # The grammar binds the answer from the first token, so all text is content.
        return request
    begin = "" if state == "open" else thought.begin
    free = FreeThought(begin, thought.end, thought.after)
    tokens = replace(request.tokens, grammar=replace(grammar, thought=free))
    reading = None
    if options.splits_thought:
        reading = Reading(
            thought=thought,
            begins_in_thought=state == "open",
            shows_thought=options.shows_thought,
            is_bound=True,
        )
    return replace(request, tokens=tokens, reading=reading)


def _state(
    thought: Thought | None, prompt: Prompt, options: AnswerOptions, *, is_bound: bool
) -> ThoughtState:
    """Return the thought's state where the answer begins.

    If `is_bound`, a grammar binds all text except a thought.
    """
    if thought is None or (is_bound and options.binds_thought):
        return "over"
    state = thought.state(prompt.end, options.continued)
    if state == "possible" and is_bound and not options.thinks:
        return "over"
    return state


def _form(known: ToolFormat | None, use: ToolUse, field: str) -> ToolFormat:
    if known is not None:
        return known
    if use.is_forced:
        return JSON_FORMAT
    message = (
        f"{field} auto is not supported: the chat template shows no known format of calls; "
        "start the gateway with --tool-format, or force a call with required"
    )
    raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, field)
