"""Turns prompts into token ids with the model's tokenizer and chat template, without torch.

A template gets the variables that `apply_chat_template` of `transformers` would give it. The
template always comes from the model, never from a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Encoding

from gateway.text.templates import DEFAULT, TOOL_USE, ChatTemplate
from gateway.tools.formats import AnswerFormat, answer_format
from outrider.errors import OutriderError, Reason, invalid
from outrider.tokenizer import fingerprint, load_tokenizer, model_file

# A text of this length takes the event loop 2 ms, at 0.4 µs a character. Longer texts are tokenised
# on a thread.
_INLINE_CHARACTERS = 5_000
# The number of texts that are tokenised on threads at the same time, besides one long text. A
# million tokens take about 200 MB while they are tokenised.
_CONCURRENT_TEXTS = 2
# A text with more than this many characters for each token of the context is probably too long. Its
# tokens are counted in slices first, to stop early and to save memory.
_USUAL_CHARACTERS = 8
_SLICE_CHARACTERS = 65_536
# Cutting a text into slices adds tokens, but far fewer than the text has.
_SLICE_FACTOR = 2
# Marks the end of the last message's content in the rendered text. As in `transformers`, the
# space shows whether the template strips the content.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class Prompts:
    """Renders and tokenises prompts for one model (a directory, a GGUF file or a hub id)."""

    def __init__(self, model: str, tool_format: str = "") -> None:
        """`tool_format` names the model's format of tool calls; "" guesses it from the template."""
        try:
            self.tokenizer = load_tokenizer(model)
        except OutriderError as error:
            raise OutriderError(error.reason, f"tokenizer: {error.message}", "tokenizer") from error
        # Some tokenizer.json files turn on truncation or padding, which would change prompts.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.fingerprint = fingerprint(self.tokenizer)
        config = _tokenizer_config(model)
        self._special_tokens = _special_tokens(config)
        sources = _templates(model, config)
        self._template = ChatTemplate(model, sources, self._special_tokens) if sources else None
        default = sources.get(DEFAULT, "")
        self.tokenizer_info = _tokenizer_info(config, self._special_tokens, default)
        """The tokenizer's settings, special tokens and chat template, in vLLM's shape."""
        # A template for tools shows the format of calls.
        self.answers: AnswerFormat = answer_format(
            f"{sources.get(TOOL_USE, '')}\n{default}", tool_format
        )
        # No token's text is longer than its name (a byte token's name is longer).
        names = self.tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, names), default=1)
        self._turns = asyncio.Semaphore(_CONCURRENT_TEXTS)
        # Long texts have separate turns, so they neither wait for short texts nor delay them. Only
        # one long text runs at a time, which leaves a processor to the event loop.
        self._long_turns = asyncio.Semaphore(1)

    async def encode(
        self, text: str, field: str, max_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the text's ids, without blocking the event loop for long.

        Raises OutriderError(CONTEXT_LENGTH_EXCEEDED) that names `field` if the text has more than
        `max_tokens` tokens. A text that is far too long is refused without tokenising all of it.
        """
        if len(text) > max_tokens * self._longest_token:
            raise _too_long(field, len(text), max_tokens)
        if len(text) > max(max_tokens * _USUAL_CHARACTERS, _SLICE_CHARACTERS):
            enough = _SLICE_FACTOR * max_tokens
            if len(await self._first_tokens(text, enough)) > enough:
                raise _too_long(field, len(text), max_tokens)
        encoding = await self._encode(text, add_special_tokens)
        count = len(encoding)
        # Check before making a list of the ids, since a list of millions takes long.
        if count > max_tokens:
            message = f"{field} has {count} tokens, and the answer needs room too"
            raise context_overflow(max_tokens, message, field)
        ids: list[int] = encoding.ids
        return ids

    async def encode_start(self, text: str, max_tokens: int) -> list[int]:
        """Return the ids of the text's beginning, at most `max_tokens`, without special tokens.

        A very long text is tokenised in slices. Near a slice's border its ids may differ from those
        of the whole text.
        """
        if len(text) > _SLICE_CHARACTERS:
            return (await self._first_tokens(text, max_tokens))[:max_tokens]
        encoding = await self._encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids[:max_tokens]

    async def _first_tokens(self, text: str, wanted: int) -> list[int]:
        """Return the ids of the text's first slices, until there are more than `wanted`."""
        ids: list[int] = []
        for begin in range(0, len(text), _SLICE_CHARACTERS):
            part = text[begin : begin + _SLICE_CHARACTERS]
            ids += (await self._encode(part, add_special_tokens=False)).ids
            if len(ids) > wanted:
                break
        return ids

    async def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) <= _INLINE_CHARACTERS:
            inline: Encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return inline
        turns = self._turns if len(text) <= _SLICE_CHARACTERS else self._long_turns
        await turns.acquire()
        # The "fast" method skips the offsets of tokens, which are not used here and slow to free.
        work = asyncio.ensure_future(
            self.tokenizer.async_encode_batch_fast([text], add_special_tokens=add_special_tokens)
        )
        # The work goes on if the caller is cancelled, so the work itself releases its turn.
        work.add_done_callback(lambda _: turns.release())
        encodings: list[Encoding] = await asyncio.shield(work)
        return encodings[0]

    async def token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return each id's name in the tokenizer, such as `Ġif`; None for an id without a token."""
        return await asyncio.to_thread(
            lambda: [self.tokenizer.id_to_token(token_id) for token_id in token_ids]
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str,
        max_tokens: int,
        tenant: str,
        **options: Any,
    ) -> str:
        """Do `render_blocking` with `options` off the event loop, when it is the tenant's turn.

        Raises OutriderError(CONTEXT_LENGTH_EXCEEDED) that names `field` if the conversation surely
        has more than `max_tokens` tokens.
        """
        length = sum(len(message["content"]) for message in messages if message["content"])
        if length > max_tokens * self._longest_token:
            raise _too_long(field, length, max_tokens)
        variables = self._variables(messages, **options)
        text = await self._known_template(field).render(variables, field, tenant)
        return _before_end_mark(text) if options.get("continue_final_message") else text

    def render_blocking(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the conversation as one text.

        `_variables` describes the options. Raises OutriderError if there is no template, if the
        template refuses the conversation (with the template's message), and if the rendering
        exceeds a limit.
        """
        template = self._known_template("messages")
        text = template.render_blocking(self._variables(messages, **options), "messages")
        return _before_end_mark(text) if options.get("continue_final_message") else text

    def _known_template(self, field: str) -> ChatTemplate:
        if self._template is None:
            message = f"{field}: the model has no chat template"
            raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message, field)
        return self._template

    def _variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the template's variables.

        `continue_final_message` ends the text with the last message's content. `tools` are OpenAI's
        objects. `variables` are variables of the template itself, such as enable_thinking.
        """
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] += _END_MARK
        return {
            **(variables or {}),
            **self._special_tokens,
            "messages": shown,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


def _before_end_mark(text: str) -> str:
    """Return the text up to the end mark, stripped if the template stripped the mark's space."""
    before, found, after = text.rpartition(_END_MARK.strip())
    if not found:
        message = "cannot be: the model's chat template does not show the last message as it is"
        raise invalid("continue_final_message", message)
    return before if after.startswith(" ") else before.rstrip()


def _too_long(field: str, characters: int, context_length: int) -> OutriderError:
    message = f"{field} has {characters} characters, more than the context can hold"
    return context_overflow(context_length, message, field)


def context_overflow(context_length: int, message: str, field: str) -> OutriderError:
    """Return CONTEXT_LENGTH_EXCEEDED with the texts that clients search for.

    litellm searches for the first sentence, and LangChain for the code in parentheses.
    """
    known = f"This model's maximum context length is {context_length} tokens."
    message = f"{known} {message} (context_length_exceeded)."
    return OutriderError(Reason.CONTEXT_LENGTH_EXCEEDED, message, field)


def _tokenizer_config(model: str) -> dict[str, Any]:
    name = "tokenizer_config.json"
    path = model_file(model, name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as cause:
        raise invalid("tokenizer", f"{model}: its {name} is not JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise invalid("tokenizer", f"{model}: its {name} must hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Map bos_token, eos_token and so on to tokens.

    In `config`, a token is a string or {"content": …}.
    """
    tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _tokenizer_info(
    config: Mapping[str, Any], special_tokens: Mapping[str, str], template: str
) -> dict[str, Any]:
    """Return `Prompts.tokenizer_info`. Tokens that the tokenizer lacks are None."""
    plain = {name: each for name, each in config.items() if isinstance(each, str | int | float)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **plain,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
        **special_tokens,
        "chat_template": template or None,
    }


def _templates(model: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the model's chat templates, keyed by name, from files or tokenizer_config.json.

    As in `transformers`, only "default" and "tool_use" are ever used. Raises
    OutriderError(INVALID_VALUE) if `chat_template` in tokenizer_config.json is neither a text nor
    a list of named texts, or if a template's file is not UTF-8.
    """
    given = config.get("chat_template")
    if not isinstance(given, list):
        given = [] if given is None else [{"name": DEFAULT, "template": given}]
    try:
        named = {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        message = f"{model}: its chat_template must be a text, or a list with name and template"
        raise invalid("tokenizer", message)
    alone = _template_file(model, "chat_template.jinja")
    if alone is not None:
        named = {DEFAULT: alone}
    for_tools = _template_file(model, f"additional_chat_templates/{TOOL_USE}.jinja")
    if for_tools is not None:
        named[TOOL_USE] = for_tools
    return {name: text for name, text in named.items() if name in (DEFAULT, TOOL_USE)}


def _template_file(model: str, name: str) -> str | None:
    path = model_file(model, name)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise invalid("tokenizer", f"{model}: its {name} is not UTF-8: {cause}") from cause
