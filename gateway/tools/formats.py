"""A table of the formats in which models write tool calls: a row for each format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.tools.thoughts import THOUGHTS, Thought, shown_thought
from outrider.errors import invalid
from outrider.grammar.arguments import TAGS

Style = Literal[
    "json",
    "qwen_xml",
    "glm_xml",
    "minimax_xml",
    "deepseek_xml",
    "deepseek_v4_1_xml",
    "gemma",
]
"""The form in which a call's arguments are written."""


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The texts around a call's arguments. `begin` has {name}, and may have {number} for digits.

    Where arguments are written in tags, blanks around the tags belong to the arguments.
    """

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model family's way of writing calls."""

    name: str
    calls: tuple[CallMarks, ...]
    """A model may write any of these variants, which all begin alike."""
    style: Style = "json"
    sections: tuple[tuple[str, str], ...] = ()
    """Pairs of texts that may enclose all calls together; empty if the format has none."""
    separator: str = "\n"
    """The text between two calls."""
    thought: Thought | None = None
    template_marks: tuple[str, ...] = ()
    """A chat template with all of these texts has this format, unless an earlier row matches."""
    call_id: Literal["call", "nine", "function"] = "call"
    """The form of a call's id, which some templates check: call_…, nine characters, or
    functions.NAME:0.
    """
    begins_as_text: bool = False
    """True if other texts begin like a call, so that only a tool's name shows that it is a call."""
    marks: tuple[str, ...] = ()
    """More strings of the format that may be special tokens."""

    @property
    def trigger(self) -> str:
        """The text with which a call or a section begins, whatever the tool and the variant."""
        if self.sections:
            return _common_start([begin for begin, _ in self.sections])
        return _common_start([marks.begin.partition("{name}")[0] for marks in self.calls])

    def begin(self, marks: CallMarks, name: str) -> str:
        """Return the fixed text with which a call of this tool begins."""
        return marks.begin.replace("{name}", name).partition("{number}")[0]

    @property
    def literals(self) -> tuple[str, ...]:
        """All marker strings of the format."""
        of_calls = [text for marks in self.calls for text in (marks.begin, marks.end)]
        of_sections = [text for pair in self.sections for text in pair]
        tags = TAGS.get(self.style)
        of_tags = [] if tags is None else [tags.begin, tags.end]
        return (*of_calls, *of_sections, *of_tags, *self.marks)


def _common_start(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


_THINK, _THINK_APART = THOUGHTS["think"], THOUGHTS["think_apart"]
_DSML = "｜DSML｜"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

_ROWS = (
    ToolFormat(
        "glm_4_7",
        (CallMarks("<tool_call>{name}", "</tool_call>"),),
        "glm_xml",
        thought=_THINK,
        template_marks=("<tool_call>", "<arg_key>"),
    ),
    ToolFormat(
        "mimo",
        (CallMarks("<tool_call><function={name}>", "</function></tool_call>"),),
        "qwen_xml",
        thought=_THINK,
        template_marks=("<tool_call><function=",),
    ),
    ToolFormat(
        "qwen_3_coder",
        (CallMarks("<tool_call>\n<function={name}>", "</function>\n</tool_call>"),),
        "qwen_xml",
        thought=_THINK_APART,
        template_marks=("<tool_call>", "<function="),
    ),
    ToolFormat(
        "exaone",
        (CallMarks('<tool_call>{"name": "{name}", "arguments": ', "}</tool_call>"),),
        thought=_THINK_APART,
        template_marks=("<tool_call>", "[|assistant|]"),
    ),
    ToolFormat(
        "qwen_3",
        (CallMarks('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),),
        thought=_THINK_APART,
        template_marks=("<tool_call>\\n{", "<|im_start|>"),
    ),
    ToolFormat(
        "hermes",
        (
            CallMarks('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
            CallMarks('<tool_call>{"name": "{name}", "arguments": ', "}</tool_call>"),
        ),
        thought=_THINK,
        template_marks=("<tool_call>",),
    ),
    ToolFormat(
        "mistral",
        (CallMarks("[TOOL_CALLS]{name}[ARGS]", ""),),
        separator="",
        thought=THOUGHTS["brackets"],
        template_marks=("[TOOL_CALLS]", "[ARGS]"),
        call_id="nine",
    ),
    ToolFormat(
        "mistral_list",
        (CallMarks('{"name": "{name}", "arguments": ', "}"),),
        sections=(("[TOOL_CALLS] [", "]"), ("[TOOL_CALLS][", "]")),
        separator=", ",
        template_marks=("[TOOL_CALLS]",),
        call_id="nine",
    ),
    ToolFormat(
        "gemma_4",
        (CallMarks("<|tool_call>call:{name}", "<tool_call|>"),),
        "gemma",
        separator="",
        thought=THOUGHTS["gemma_4"],
        template_marks=("<|tool_call>call:",),
        marks=('<|"|>',),
    ),
    ToolFormat(
        "deepseek_r1",
        (
            CallMarks(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
                "\n```<｜tool▁call▁end｜>",
            ),
        ),
        sections=(_DEEPSEEK,),
        thought=_THINK,
        template_marks=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ToolFormat(
        "deepseek_v3_1",
        (CallMarks("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),),
        sections=(_DEEPSEEK,),
        separator="",
        thought=_THINK,
        template_marks=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "deepseek_v4_1",
        (CallMarks(f'<{_DSML} invoke name="{{name}}">', f"</{_DSML} invoke>\n"),),
        "deepseek_v4_1_xml",
        sections=((f"<{_DSML} calls>\n", f"</{_DSML} calls>"),),
        separator="",
        thought=_THINK,
        template_marks=(f"{_DSML} calls",),
    ),
    ToolFormat(
        "deepseek_v3_2",
        (CallMarks(f'<{_DSML}invoke name="{{name}}">', f"</{_DSML}invoke>\n"),),
        "deepseek_xml",
        sections=((f"<{_DSML}function_calls>\n", f"</{_DSML}function_calls>"),),
        separator="",
        thought=_THINK,
        template_marks=(f"{_DSML}function_calls",),
    ),
    ToolFormat(
        "deepseek_v4",
        (CallMarks(f'<{_DSML}invoke name="{{name}}">', f"</{_DSML}invoke>\n"),),
        "deepseek_xml",
        sections=((f"<{_DSML}tool_calls>\n", f"</{_DSML}tool_calls>"),),
        separator="",
        thought=_THINK,
        template_marks=(_DSML,),
    ),
    ToolFormat(
        "kimi",
        (
            CallMarks(
                "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
        ),
        sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        separator="",
        thought=_THINK,
        template_marks=("<|tool_calls_section_begin|>",),
        call_id="function",
    ),
    ToolFormat(
        "minimax",
        (CallMarks('<invoke name="{name}">', "</invoke>\n"),),
        "minimax_xml",
        sections=(("<minimax:tool_call>\n", "</minimax:tool_call>"),),
        separator="",
        thought=_THINK_APART,
        template_marks=("<minimax:tool_call>",),
    ),
    ToolFormat(
        "harmony",
        # The token that ends a call ends the answer, too.
        (CallMarks("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),),
        separator="",
        thought=THOUGHTS["harmony"],
        template_marks=("<|channel|>commentary", "<|call|>"),
    ),
    ToolFormat(
        "llama",
        (CallMarks('{"name": "{name}", "parameters": ', "}"),),
        begins_as_text=True,
        template_marks=("<|start_header_id|>", '"parameters": '),
    ),
)

FORMATS = {row.name: row for row in _ROWS}
"""All formats, keyed by name."""

JSON_FORMAT = ToolFormat("json", (CallMarks('{"name": "{name}", "arguments": ', "}"),))
"""The format of a forced call if the model has no known format."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats of a model's calls and thoughts; None for an unknown format, or for none."""

    calls: ToolFormat | None = None
    thought: Thought | None = None

    def __str__(self) -> str:
        calls = "unknown" if self.calls is None else self.calls.name
        thought = "none" if self.thought is None else self.thought.begin.strip()
        return f"format of tool calls: {calls}; mark of thoughts: {thought}"


def answer_format(template: str, name: str = "") -> AnswerFormat:
    """Return the formats of a model's calls and thoughts, according to its chat template.

    If `name` is given, it names the format of calls, or is "none" for no calls. Raises
    OutriderError(INVALID_VALUE) for an unknown name.
    """
    if name and name != "none" and name not in FORMATS:
        raise invalid("tool-format", f"must be none or one of {', '.join(FORMATS)}, not {name!r}")
    calls = FORMATS.get(name) if name else _shown_calls(template)
    known = None if calls is None else calls.thought
    return AnswerFormat(calls, shown_thought(template, known))


def _shown_calls(template: str) -> ToolFormat | None:
    matching = [row for row in _ROWS if all(mark in template for mark in row.template_marks)]
    return matching[0] if matching else None
