"""Prompts to token ids: the model's tokenizer and its chat template, without torch or transformers.

The template sees what `transformers`' `apply_chat_template` would show it; it comes from the model alone, never from a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding

from outrider.errors import OutriderError, Reason, invalid
from outrider.tokenizer import fingerprint, load_tokenizer, model_file

# Longer texts are tokenised on a thread: at about 0.4 µs a character this is some 2 ms of the event loop.
_AT_ONCE_CHARACTERS = 5_000
# Templates are programs in Python; so is what jinja2 makes of them.
_AT_ONCE_MESSAGES = 64
# How many texts are tokenised on threads at once, beside a long one; a million tokens take some 200 MB meanwhile.
_AT_ONCE_TEXTS = 2
# A text with more characters for each token of the context is counted in slices first, so that what is far too long is neither
# tokenised to its end nor kept in memory.
_USUAL_CHARACTERS = 8
_SLICE_CHARACTERS = 65_536
# The slices of a text have a few tokens more than the text.
_SLICED = 2
# Put behind the last message's content to find its end in the rendered text. As in `transformers`, the space tells whether the
# template trims what it shows.
_FINAL = "CONTINUE_FINAL_MESSAGE_TAG "


class Prompts:
    """Renders and tokenises prompts for one model (a directory or a hub id)."""

    def __init__(self, model: str) -> None:
        self.tokenizer = load_tokenizer(model)
        # Some tokenizer.json files would silently cut a prompt or fill it up.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.fingerprint = fingerprint(self.tokenizer)
        config = _json_file(model, "tokenizer_config.json")
        self._special_tokens = _special_tokens(config)
        self._template = _template(model, config)
        # Names of byte tokens are longer than their text, never shorter.
        self._longest_token = max(
            map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1
        )
        self._turns = asyncio.Semaphore(_AT_ONCE_TEXTS)
        # So that a long text neither waits for many short ones, nor they for it, and leaves a processor to the event loop.
        self._long_turns = asyncio.Semaphore(1)

    async def encode(
        self, text: str, field: str, most_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The text's ids; a long text does not hold up the event loop.

        A text that cannot have as few as `most_tokens` tokens is refused before it is tokenised: raises
        OutriderError(CONTEXT_LENGTH_EXCEEDED) that names `field`. So is one that has more.
        """
        if len(text) > most_tokens * self._longest_token:
            raise _too_long(field, f"{len(text)} characters", most_tokens)
        is_unusual = len(text) > max(most_tokens * _USUAL_CHARACTERS, _SLICE_CHARACTERS)
        if (
            is_unusual
            and len(await self._first_tokens(text, _SLICED * most_tokens)) > _SLICED * most_tokens
        ):
            raise _too_long(field, f"{len(text)} characters", most_tokens)
        encoding = await self._encode(text, add_special_tokens)
        # To make a list of millions of ids takes long as well.
        if (count := len(encoding)) > most_tokens:
            raise context_overflow(
                most_tokens, f"{field} has {count} tokens, and the answer needs room too", field
            )
        ids: list[int] = encoding.ids
        return ids

    async def encode_start(self, text: str, most_tokens: int) -> list[int]:
        """At most so many ids of the text's beginning, without special tokens; of a very long text, ids of its slices."""
        if len(text) > _SLICE_CHARACTERS:
            return (await self._first_tokens(text, most_tokens))[:most_tokens]
        ids: list[int] = (await self._encode(text, add_special_tokens=False)).ids
        return ids[:most_tokens]

    async def _first_tokens(self, text: str, wanted: int) -> list[int]:
        """Tokens of the text's slices, to the slice with which there are more than `wanted`."""
        found: list[int] = []
        for begin in range(0, len(text), _SLICE_CHARACTERS):
            found += (
                await self._encode(
                    text[begin : begin + _SLICE_CHARACTERS], add_special_tokens=False
                )
            ).ids
            if len(found) > wanted:
                break
        return found

    async def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) <= _AT_ONCE_CHARACTERS:
            at_once: Encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return at_once
        turns = self._turns if len(text) <= _SLICE_CHARACTERS else self._long_turns
        await turns.acquire()
        # "Fast" leaves out where in the text tokens begin, which nobody asks for here and takes long to free.
        work = asyncio.ensure_future(
            self.tokenizer.async_encode_batch_fast([text], add_special_tokens=add_special_tokens)
        )
        # A caller that is cancelled does not end the work.
        work.add_done_callback(lambda _: turns.release())
        encodings: list[Encoding] = await asyncio.shield(work)
        return encodings[0]

    async def token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """The tokenizer's own names of the tokens."""
        return await asyncio.to_thread(
            lambda: [self.tokenizer.id_to_token(token_id) for token_id in token_ids]
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids' text, special tokens included."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    async def rendered(
        self, messages: Sequence[Mapping[str, str]], field: str, most_tokens: int, **how: Any
    ) -> str:
        """`render`, where a long conversation does not hold up the event loop; much too long ones are refused as by `encode`."""
        length = sum(len(message["content"]) for message in messages)
        if length > most_tokens * self._longest_token:
            raise _too_long(field, f"{length} characters", most_tokens)
        if length <= _SLICE_CHARACTERS and len(messages) <= _AT_ONCE_MESSAGES:
            return self.render(messages, **how)
        return await asyncio.to_thread(self.render, messages, **how)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text; raises OutriderError with the template's own words when it does not take it.

        `continue_final_message` ends the text with the last message's content. `variables` are the template's own, such as
        enable_thinking.
        """
        if self._template is None:
            raise OutriderError(
                Reason.UNSUPPORTED_PARAMETER, "messages: the model has no chat template", "messages"
            )
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] += _FINAL
        try:
            text = self._template.render(
                messages=shown,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**(variables or {}), **self._special_tokens},
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise invalid(
                "messages", f"were refused by the model's chat template: {error}"
            ) from error
        return _left_open(text) if continue_final_message else text


def _left_open(text: str) -> str:
    """The text up to the mark behind the last message's content, without the space that a template trims there."""
    before, found, after = text.rpartition(_FINAL.strip())
    if not found:
        raise invalid(
            "continue_final_message",
            "cannot be: the model's chat template does not show the last message as it is",
        )
    return before if after.startswith(" ") else before.rstrip()


def _too_long(field: str, length: str, context_length: int) -> OutriderError:
    return context_overflow(
        context_length, f"{field} has {length}, more than the context can hold", field
    )


def context_overflow(context_length: int, message: str, field: str) -> OutriderError:
    """CONTEXT_LENGTH_EXCEEDED, in words that clients know: litellm looks for the first sentence, LangChain for the code."""
    message = f"This model's maximum context length is {context_length} tokens. {message} (context_length_exceeded)."
    return OutriderError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field)


def _json_file(model: str, name: str) -> dict[str, Any]:
    path = model_file(model, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except ValueError as cause:
        raise invalid("tokenizer", f"{model}: its {name} is not JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise invalid("tokenizer", f"{model}: its {name} must hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, as a template may name them; a token is written as a string or as {"content": …}."""
    tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _template(model: str, config: Mapping[str, Any]) -> jinja2.Template | None:
    """The model's chat template, from its own file or from tokenizer_config.json; of several, the one named "default"."""
    path = model_file(model, "chat_template.jinja")
    source = path.read_text(encoding="utf-8") if path is not None else config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    try:
        return _environment().from_string(source) if source is not None else None
    except jinja2.TemplateSyntaxError as cause:
        raise invalid("tokenizer", f"{model}: its chat template does not parse: {cause}") from cause


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
