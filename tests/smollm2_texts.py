"""Prompts for SmolLM2 in six languages, and a check of greedy texts by transformers."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, zip_longest

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.errors import OutriderError
from outrider.gguf import pretrained
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.smollm2 import gguf_file
from outrider.tokenizer import end_token_ids, load_tokenizer
from tests.stack import Client

COUNT = int(os.environ.get("OUTRIDER_SMOLLM2_TEXTS", "12"))
"""How many texts a test asks for, at most 216."""
TOKENS = 24
# A greedy token's logit may be this far below the highest logit. In such a tie, the order in which
# a sum's terms are added decides which token has the highest logit.
TIE = 1e-4
LOGPROB_ERROR = 1e-4

# For each language: topics, questions for chats, and beginnings for completions.
_LANGUAGES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "English": (
        ["the sea", "bread", "a train", "winter", "a library", "the moon"],
        [
            "Tell me about {} in two sentences.",
            "Write three words about {}.",
            "Why do people like {}?",
        ],
        ["Once upon a time there was {} and", "A short poem about {}:\n", "Facts about {}:\n1."],
    ),
    "German": (
        ["das Meer", "Brot", "ein Zug", "der Winter", "eine Bücherei", "der Mond"],
        ["Was ist {}?", "Schreibe einen Satz über {}.", "Übersetze ins Englische: {}."],
        ["Es war einmal {} und", "Ein kurzes Gedicht über {}:\n", "Fünf Gründe für {}:\n1."],
    ),
    "French": (
        ["la mer", "le pain", "un train", "l\u2019hiver", "une bibliothèque", "la lune"],
        ["Parle-moi de {}.", "Écris une phrase sur {}.", "Traduis en anglais : {}."],
        ["Il était une fois {} et", "Un poème sur {} :\n", "Trois idées sur {} :\n1."],
    ),
    "Spanish": (
        ["el mar", "el pan", "un tren", "el invierno", "una biblioteca", "la luna"],
        ["¿Qué es {}?", "Escribe una frase sobre {}.", "Traduce al inglés: {}."],
        ["Había una vez {} y", "Un poema sobre {}:\n", "Tres ideas sobre {}:\n1."],
    ),
    "Russian": (
        ["море", "хлеб", "поезд", "зима", "библиотека", "луна"],
        ["Что такое {}?", "Напиши предложение: {}.", "Переведи на английский: {}."],
        ["Жили-были {} и", "Стихи, {}:\n", "Три мысли, {}:\n1."],
    ),
    "Chinese": (
        ["大海", "面包", "火车", "冬天", "图书馆", "月亮"],
        ["{}是什么？", "请写一句关于{}的话。", "请翻译成英文：{}。"],
        ["从前有{}，", "关于{}的诗：\n", "关于{}的三个想法：\n1."],
    ),
}
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def _texts() -> list[str]:
    """Return 216 prompts, in which languages, chats and completions take turns."""
    by_language = []
    for topics, asked, begun in _LANGUAGES.values():
        chats = [_CHAT.format(form.format(topic)) for topic in topics for form in asked]
        others = [form.format(topic) for topic in topics for form in begun]
        by_language.append(list(chain.from_iterable(zip(chats, others, strict=True))))
    turns = zip_longest(*by_language)
    # Each turn has a text of every language; chats and completions alternate between turns.
    return [text for turn in turns for text in turn]


def is_chat(index: int) -> bool:
    """Return whether a prompt is a chat: chats and completions alternate, six of each at a time."""
    return index // len(_LANGUAGES) % 2 == 0


def smollm2() -> str:
    """Return the model's file; skip the test if it is missing."""
    try:
        return gguf_file()
    except OutriderError as error:
        pytest.skip(error.message)


async def answers(client: Client, requests: list[TokenRequest]) -> list[list[TokenChunk]]:
    """Return the answers to the requests; eight requests run at once."""
    places = asyncio.Semaphore(8)

    async def one(request: TokenRequest) -> list[TokenChunk]:
        async with places:
            return await client.generate(request)

    return await asyncio.gather(*map(one, requests))


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    """Return all tokens of an answer."""
    return [token for chunk in chunks for token in chunk.token_ids]


@dataclass(eq=False)
class Reference:
    """A model in transformers, in float32, and prompts for it."""

    file: str
    count: int = COUNT
    length: int = TOKENS
    """How many tokens an answer has, unless it ends earlier."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.file)

    @cached_property
    def prompts(self) -> list[list[int]]:
        found = self.tokenizer.encode_batch(_texts()[: self.count])
        return [encoding.ids for encoding in found]

    @cached_property
    def model(self) -> PreTrainedModel:
        path = pretrained(self.file)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model

    @cached_property
    def ends(self) -> set[int]:
        return set(end_token_ids(self.file, self.model.config.vocab_size))

    def written(self, index: int) -> list[int]:
        """Return the text that `generate` writes after a prompt."""
        ids = torch.tensor([self.prompts[index]])
        out = self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.length,
            do_sample=False,
            eos_token_id=sorted(self.ends),
            pad_token_id=min(self.ends),
        )
        found: list[int] = out[0, len(self.prompts[index]) :].tolist()
        return found

    def check(self, index: int, chunks: list[TokenChunk]) -> float:
        """Check that a greedy answer is the text of `generate`, with its log probabilities.

        Each token of that text is the likeliest after the text before it. One forward over the text
        shows this. Returns the largest error of a log probability.
        """
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        scores = [each.logprob for chunk in chunks for each in chunk.logprobs]
        wanted = self.logprobs(index, tuple(tokens))
        assert len(scores) == len(tokens)
        error = float((wanted - torch.tensor(scores)).abs().max())
        assert error < LOGPROB_ERROR, f"{index}: a log probability is {error} off"
        return error

    @cache  # noqa: B019 - a reference lives as long as its tests.
    def logprobs(self, index: int, tokens: tuple[int, ...]) -> torch.Tensor:
        """Check a greedy text, and return the log probabilities of its tokens."""
        prompt = self.prompts[index]
        assert len(tokens) == self.length or tokens[-1] in self.ends, (
            f"{index} ends early: {tokens}"
        )
        assert not self.ends & set(tokens[:-1]), f"{index} goes on after its end: {tokens}"
        with torch.no_grad():
            whole = self.model(torch.tensor([[*prompt, *tokens[:-1]]]))
        logits = whole.logits[0, len(prompt) - 1 :]
        picked = torch.tensor(tokens).unsqueeze(-1)
        own = logits.gather(-1, picked).squeeze(-1)
        wrong = (logits.amax(-1) - own > TIE).nonzero().flatten().tolist()
        assert not wrong, f"{index}: token {wrong[0]} is {tokens[wrong[0]]}, as text {tokens}"
        return logits.log_softmax(-1).gather(-1, picked).squeeze(-1)
