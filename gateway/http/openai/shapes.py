"""OpenAI's answers as dictionaries: whole answers, and the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from gateway.http.long_json import LongList
from gateway.http.openai.schema import StreamOptions
from gateway.text.choices import UsageTotals, WholeChoice
from gateway.text.deltas import AttributedToken, FinishInfo, LogprobToken, TextDelta
from gateway.tools.reader import CallArguments, CallBegin, Content, Part, Reasoning
from outrider import __version__
from outrider.protocol.messages import FinishReason

Json = dict[str, Any]
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_FINGERPRINT = f"outrider-{__version__}"


def _named(token: LogprobToken) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


def _with_top(token: LogprobToken) -> Json:
    return {**_named(token), "top_logprobs": [_named(likely) for likely in token.top]}


def _top_logprobs(token: LogprobToken) -> dict[str, float | None] | None:
    """Map tokens' texts to log probabilities, the likeliest first.

    The token itself is among them, as at OpenAI. Several tokens may have the same text, such as
    parts of characters. Of these tokens, the likeliest is kept.
    """
    if token.logprob is None:
        return None
    by_text: dict[str, float | None] = {}
    for likely in (*token.top, token):
        by_text.setdefault(likely.text, likely.logprob)
    return by_text


def _prompt_logprobs(prompt: Sequence[LogprobToken]) -> LongList:
    """Return vLLM's list: an object keyed by token id for each prompt token, None for the first."""
    return LongList(_by_id, prompt)


def _by_id(token: LogprobToken) -> Json | None:
    if token.logprob is None:
        return None
    return {
        str(likely.token_id): {
            "logprob": likely.logprob,
            "rank": likely.rank,
            "decoded_token": likely.text,
        }
        for likely in (token, *token.top)
    }


def attribution(tokens: Sequence[AttributedToken]) -> Json:
    """Return the `speculation` field of a choice: its tokens with their sources.

    The result is empty without tokens.
    """
    if not tokens:
        return {}
    return {"speculation": {"tokens": [_attributed(token) for token in tokens]}}


def _attributed(token: AttributedToken) -> Json:
    shown: Json = {
        "text": token.text,
        "source": token.source.name.lower(),
        "drafter": token.drafter_id or None,
    }
    return shown if token.part == "" else shown | {"part": token.part}


def _finish(finish: FinishInfo | None) -> Json:
    """Return the fields that say why a choice ended; the reason is null if the choice goes on."""
    if finish is None:
        return {"finish_reason": None}
    incomplete = {"grammar_incomplete": True} if finish.grammar_incomplete else {}
    reason = _FINISH[finish.reason]
    if reason == "stop" and finish.call_count:
        reason = "tool_calls"
    return {"finish_reason": reason, **incomplete}


_Listed = Callable[[Callable[[LogprobToken], Any], Sequence[LogprobToken]], Any]


def _made(make: Callable[[LogprobToken], Any], tokens: Sequence[LogprobToken]) -> list[Any]:
    return [make(token) for token in tokens]


class ResponseShape(ABC):
    """Writes the answers of one endpoint. Subclasses write its choices."""

    whole_object: str
    chunk_object: str
    opening: ClassVar[Json | None] = None
    """The content of a choice's first chunk, before any text; None if there is no such chunk."""
    closing: ClassVar[Json]
    """The content of a choice's last chunk, with the finish reason."""

    def __init__(self, model: str, answer_id: str) -> None:
        self.id = answer_id
        self.model = model
        self._created = int(time.time())

    def _answer(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }

    def whole(
        self,
        answered: Sequence[WholeChoice],
        totals: UsageTotals,
        shown: Sequence[Sequence[LogprobToken]],
    ) -> Json:
        """Return the answer to a request that does not stream.

        `shown` has each choice's tokens with log probabilities.
        """
        choices: list[Json] = []
        for given, finish, tokens in zip(answered, totals.finishes, shown, strict=True):
            choice = {
                "index": len(choices),
                **self._whole_choice(given),
                "logprobs": self.logprobs(tokens, LongList),
                **_finish(finish),
            }
            choices.append(choice)
        return self._answer(self.whole_object, choices) | {"usage": totals.usage()}

    def chunk(
        self,
        index: int,
        content: Json,
        finish: FinishInfo | None = None,
        logprobs: Json | None = None,
    ) -> Json:
        """Return a chunk with one choice."""
        choice = {"index": index, **content, "logprobs": logprobs, **_finish(finish)}
        return self._answer(self.chunk_object, [choice])

    def usage_chunk(self, usage: Json) -> Json:
        """Return a stream's last chunk, which holds the usage."""
        return self._answer(self.chunk_object, []) | {"usage": usage}

    @abstractmethod
    def _whole_choice(self, given: WholeChoice) -> Json:
        """Return the content of a choice of a whole answer."""

    @abstractmethod
    def add_prompt_logprobs(self, answer: Json, prompts: Sequence[Sequence[LogprobToken]]) -> None:
        """Add vLLM's `prompt_logprobs` to a whole answer. `prompts` has a list for each choice."""

    @abstractmethod
    def logprobs(self, shown: Sequence[LogprobToken], listed: _Listed = _made) -> Json | None:
        """Return OpenAI's `logprobs` object of tokens; None without tokens.

        `listed` builds each list.
        """

    @abstractmethod
    def delta(self, part: Part) -> Json:
        """Return the content of a chunk with a part of the answer."""


class CompletionShape(ResponseShape):
    """POST /v1/completions."""

    whole_object = chunk_object = "text_completion"
    closing: ClassVar[Json] = {"text": ""}

    def add_prompt_logprobs(self, answer: Json, prompts: Sequence[Sequence[LogprobToken]]) -> None:
        """Add each choice's prompt scores to the choice, as vLLM does."""
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = _prompt_logprobs(prompt)

    def logprobs(self, shown: Sequence[LogprobToken], listed: _Listed = _made) -> Json | None:
        """Return lists with an entry for each token, as in OpenAI's completions."""
        if not shown:
            return None
        return {
            "tokens": listed(lambda token: token.text, shown),
            "token_logprobs": listed(lambda token: token.logprob, shown),
            "top_logprobs": listed(_top_logprobs, shown),
            "text_offset": listed(lambda token: token.offset, shown),
        }

    def _whole_choice(self, given: WholeChoice) -> Json:
        return {"text": given.text}

    def delta(self, part: Part) -> Json:
        """Return the part's text."""
        return {"text": part.text if isinstance(part, Content) else ""}


class ChatShape(ResponseShape):
    """POST /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening: ClassVar[Json | None] = {
        "delta": {"role": "assistant", "content": "", "refusal": None}
    }
    closing: ClassVar[Json] = {"delta": {}}

    def add_prompt_logprobs(self, answer: Json, prompts: Sequence[Sequence[LogprobToken]]) -> None:
        """Add the scores of the only prompt beside the choices, as vLLM does."""
        answer["prompt_logprobs"] = _prompt_logprobs(prompts[0])

    def logprobs(self, shown: Sequence[LogprobToken], listed: _Listed = _made) -> Json | None:
        """Return a list with an object for each token, as in OpenAI's chats."""
        return {"content": listed(_with_top, shown), "refusal": None} if shown else None

    def _whole_choice(self, given: WholeChoice) -> Json:
        message: Json = {"role": "assistant", "content": given.text, "refusal": None}
        thought = "".join([part.text for part in given.parts if isinstance(part, Reasoning)])
        if thought:
            message["reasoning_content"] = thought
        if calls := _whole_calls(given.parts):
            message["tool_calls"] = calls
        if thought or calls:
            message["content"] = given.text or None
        return {"message": message}

    def delta(self, part: Part) -> Json:
        """Return the part as a delta of a chat's message."""
        if isinstance(part, Content):
            return {"delta": {"content": part.text}}
        if isinstance(part, Reasoning):
            return {"delta": {"reasoning_content": part.text}}
        if isinstance(part, CallBegin):
            call = {"index": part.index, **_call(part, "")}
        else:
            call = {"index": part.index, "function": {"arguments": part.text}}
        return {"delta": {"tool_calls": [call]}}


def _call(begin: CallBegin, arguments: str) -> Json:
    function = {"name": begin.name, "arguments": arguments}
    return {"id": begin.call_id, "type": "function", "function": function}


def _whole_calls(parts: Sequence[Part]) -> list[Json]:
    """Return the calls among the parts."""
    begins = [part for part in parts if isinstance(part, CallBegin)]
    pieces: dict[int, list[str]] = {begin.index: [] for begin in begins}
    for part in parts:
        if isinstance(part, CallArguments):
            pieces[part.index].append(part.text)
    return [_call(begin, "".join(pieces[begin.index])) for begin in begins]


class ChunkMaker:
    """Makes the chunks of an endpoint's stream from a request's events.

    `prompt_lengths` has each choice's number of prompt tokens, for vLLM's `continuous_usage_stats`.
    """

    def __init__(
        self,
        shape: ResponseShape,
        totals: UsageTotals,
        options: StreamOptions,
        prompt_lengths: Sequence[int],
        *,
        metrics: bool,
    ) -> None:
        self._shape = shape
        self._totals = totals
        self._options = options
        self._prompt_lengths = prompt_lengths
        self._include_metrics = metrics
        self._token_counts = [0] * len(totals.finishes)
        self._opened: set[int] = set()
        self._open_count = len(totals.finishes)

    @property
    def complete(self) -> bool:
        """True if every choice has ended."""
        return self._open_count == 0

    def chunks(self, index: int, delta: TextDelta) -> list[Json]:
        """Return the chunks for a delta; none if it has nothing to show.

        A delta may have log probabilities without text, while the text is held back.
        """
        shape = self._shape
        made: list[Json] = []
        if index not in self._opened:
            self._opened.add(index)
            if shape.opening is not None:
                made.append(shape.chunk(index, shape.opening) | self._usage(index))
        self._token_counts[index] += len(delta.token_ids)
        # In a stream a prompt is scored only for an echo, so its tokens belong to the output.
        shown = [*delta.prompt, *delta.shown]
        parts = delta.all_parts
        if not parts and (shown or delta.attributed):
            parts = [Content("")]
        for part in parts:
            content = shape.delta(part)
            logprobs = None
            # The first part carries the sources and log probabilities of all the delta's tokens.
            if part is parts[0]:
                content |= attribution(delta.attributed)
                logprobs = shape.logprobs(shown)
            made.append(shape.chunk(index, content, logprobs=logprobs) | self._usage(index))
        if delta.finish is not None:
            made += self._closing(index, delta.finish)
        return made

    def _usage(self, index: int) -> Json:
        """Return a chunk's `usage` field: vLLM's usage of the choice so far, or OpenAI's null."""
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage_stats:
            return {"usage": None}
        prompt = self._prompt_lengths[index]
        completion = self._token_counts[index]
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return {"usage": usage}

    def _closing(self, index: int, finish: FinishInfo) -> list[Json]:
        """Return the chunks that end a choice, and after the last choice also the stream."""
        closing = self._shape.chunk(index, self._shape.closing, finish) | self._usage(index)
        self._open_count -= 1
        if self._open_count:
            return [closing]
        extra = self._totals.speculation()
        if self._include_metrics:
            extra["metrics"] = self._totals.metrics()
        if not self._options.include_usage:
            return [closing | extra]
        return [closing, self._shape.usage_chunk(self._totals.usage()) | extra]
