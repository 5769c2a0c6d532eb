"""The chats that `write_chats.py` wrote, as rows of ids with the target's states beside them.

The target runs once over every row. The target's states are in a file, which every head and every
epoch reads. Without this file, the target's forwards would take a third of a head's training time.
"""

import json
import pathlib
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

CONTEXT = 512
HELD_OUT = 20
"""Every HELD_OUT-th row is for measuring."""


@dataclass(frozen=True)
class Rows:
    """Rows [N, CONTEXT] of ids with what the target makes of them.

    `answers` marks the tokens that an assistant wrote. `states` [N, CONTEXT, 4 * hidden] are the
    residual stream at three boundaries and the state after the final norm, in bfloat16. `best` are
    the target's likeliest next tokens.
    """

    ids: Tensor
    answers: Tensor
    states: Tensor
    best: Tensor

    def held_out(self) -> Tensor:
        """Return the numbers of the rows for measuring."""
        return torch.arange(HELD_OUT - 1, len(self.ids), HELD_OUT)

    def trained(self) -> Tensor:
        """Return the numbers of the rows to train on."""
        numbers = torch.arange(len(self.ids))
        return numbers[numbers % HELD_OUT != HELD_OUT - 1]


def pack(chats: pathlib.Path, tokenizer: AutoTokenizer) -> tuple[Tensor, Tensor]:
    """Return ids and answers [N, CONTEXT]: chats one after the other; a row cuts its last chat off.

    `answers` is true for the tokens that the assistant writes, including the token that ends the
    message, but not for the header that the template writes before the message.
    """
    rows, answers = [], []
    ids: list[int] = []
    own: list[bool] = []
    for line in chats.read_text().splitlines():
        messages = json.loads(line)["messages"]
        done = ""
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _text(tokenizer, messages[:n], answered=False)
            after = _text(tokenizer, messages[: n + 1], answered=True)
            prompt = tokenizer.encode(before[len(done) :], add_special_tokens=False)
            answer = tokenizer.encode(after[len(before) :], add_special_tokens=False)
            ids += prompt + answer
            own += [False] * len(prompt) + [True] * len(answer)
            done = after
        if len(ids) >= CONTEXT:
            rows.append(ids[:CONTEXT])
            answers.append(own[:CONTEXT])
            ids, own = [], []
    return torch.tensor(rows), torch.tensor(answers)


def _text(tokenizer: AutoTokenizer, messages: list[dict[str, str]], *, answered: bool) -> str:
    """Return the chat as the template writes it."""
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=not answered
    )
    return text


@torch.no_grad()
def read(
    target: LlamaForCausalLM, chats: pathlib.Path, work: pathlib.Path, boundaries: list[int]
) -> Rows:
    """Return the rows of the chats; the target's states are computed if `work` lacks them."""
    name = target.config._name_or_path
    ids, answers = pack(chats, AutoTokenizer.from_pretrained(name))
    hidden = target.config.hidden_size
    work.mkdir(parents=True, exist_ok=True)
    kept = work / f"target-{len(ids)}"
    if not kept.exists():
        fresh = kept.with_suffix(".fresh")
        fresh.mkdir(exist_ok=True)
        states, best = _files(fresh, ids, hidden)
        for n in tqdm(range(0, len(ids), 4), desc="states of the target"):
            out = target.model(ids[n : n + 4], output_hidden_states=True, use_cache=False)
            parts = [out.hidden_states[k] for k in boundaries]
            states[n : n + 4] = torch.cat([*parts, out.last_hidden_state], dim=-1)
            best[n : n + 4] = target.lm_head(out.last_hidden_state).argmax(-1)
        # A run that is interrupted leaves no folder of this name.
        fresh.rename(kept)
    return Rows(ids, answers, *_files(kept, ids, hidden))


def _files(folder: pathlib.Path, ids: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Return the states [N, CONTEXT, 4 * hidden] and best ids [N, CONTEXT] in files of a folder."""
    width, count = 4 * hidden, ids.numel()
    states = torch.from_file(
        str(folder / "states"), shared=True, size=count * width, dtype=torch.bfloat16
    )
    best = torch.from_file(str(folder / "best"), shared=True, size=count, dtype=torch.int32)
    return states.view(*ids.shape, width), best.view(ids.shape)
