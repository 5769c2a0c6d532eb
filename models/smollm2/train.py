"""Train a drafter for a Llama target on chats that the target wrote; write it in bfloat16.

`eagle3` and `mtp` are heads, `draft` a small model with the target's tokens. All three learn the
target's distribution in the answers. A head learns it over several steps of its own drafting, and
over the ids that the target draws most often. At the end, the script prints how often draft tokens
1 to 4 are the target's likeliest token in held-out answers, after true tokens of the answer.

Usage: train.py eagle3|mtp|draft SECONDS --target DIR --chats FILE --out DIR
The target of a GGUF file lies in the cache that `outrider serve` names.
"""

import argparse
import json
import math
import pathlib
import time
from abc import abstractmethod
from collections.abc import Iterator

import torch
from chats import Rows, read
from trainable_heads import HEADS, Batch, Head
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PEAK_LEARNING_RATES = {"eagle3": 2e-3, "mtp": 2e-3, "draft": 4e-3}
OTHER_IDS = 2048
"""A drafter with all ids learns the target's most frequent ids, and this many others in a step."""
DRAFT_SHAPE = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 512,
    "head_dim": 64,
}


class Trained(nn.Module):
    """A drafter in training: its loss, its guesses and its files."""

    def __init__(self, target: LlamaForCausalLM, rows: Rows, count: int) -> None:
        super().__init__()
        # A list keeps the target out of this module's parameters.
        self.targets, self.rows = [target], rows
        answers = torch.cat([rows.best[rows.answers], rows.ids[rows.answers]])
        drawn = torch.bincount(answers, minlength=target.vocab_size)
        self.ids = drawn.topk(count).indices.sort().values
        self.known = torch.zeros(target.vocab_size, dtype=torch.bool)
        self.known[self.ids] = True

    def output_rows(self, ids: Tensor) -> Tensor:
        """Return the target's output embeddings [D, hidden] of these ids."""
        rows: Tensor = self.targets[0].lm_head.weight[ids].float()
        return rows

    def known_and_others(self) -> Tensor:
        """Return the ids that the target draws most often, and a sample of all others."""
        others = torch.randint(len(self.known), (OTHER_IDS,)).unique()
        return torch.cat([self.ids, others[~self.known[others]]])

    @abstractmethod
    def loss(self, numbers: Tensor) -> Tensor:
        """Return the loss of the rows with these numbers."""

    @abstractmethod
    def guesses(self, numbers: Tensor) -> Iterator[Tensor]:
        """Yield per step s the ids [B, T - 1 - s] guessed for token a + 2 + s of each place a."""

    @abstractmethod
    def write(self, out: pathlib.Path) -> None:
        """Write the weights and the configuration."""


class TrainedHead(Trained):
    """A head, with the rows it learns from."""

    def __init__(self, name: str, target: LlamaForCausalLM, rows: Rows, count: int) -> None:
        super().__init__(target, rows, count)
        self.head: Head = HEADS[name](target.config, boundaries(target), count)
        self.head.start(target, self.ids)

    def batch(self, numbers: Tensor, shown: Tensor) -> Batch:
        """Return what the head reads and learns of these rows, with the logits of the ids shown."""
        ids, states = self.rows.ids[numbers], self.rows.states[numbers].float()
        counts = self.known[self.rows.best[numbers]]
        counts[:, :-1] &= self.rows.answers[numbers][:, 1:]
        with torch.no_grad():
            embedded = self.targets[0].model.embed_tokens(ids).float()
            matrix = self.output_rows(shown)
            goal = states.new_zeros(*ids.shape, len(shown))
            final = states[counts][:, -embedded.shape[-1] :]
            goal[counts] = (final @ matrix.T).float().softmax(-1)
        return Batch(embedded, states, goal, counts, matrix)

    def loss(self, numbers: Tensor) -> Tensor:
        shown = self.ids if self.head.has_own_ids else self.known_and_others()
        return self.head.loss(self.batch(numbers, shown))

    def guesses(self, numbers: Tensor) -> Iterator[Tensor]:
        ids = self.ids if self.head.has_own_ids else torch.arange(len(self.known))
        rows = self.output_rows(ids)
        for state in self.head.unroll(self.batch(numbers, self.ids), 4):
            yield ids[self.head.scores(state, rows).argmax(-1)]

    def write(self, out: pathlib.Path) -> None:
        tensors = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in self.head.state_dict().items()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        config = self.head.config(self.targets[0])
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


class TrainedModel(Trained):
    """A draft model with the target's tokens. It starts with the target's embeddings, projected."""

    def __init__(self, target: LlamaForCausalLM, rows: Rows, count: int) -> None:
        super().__init__(target, rows, count)
        self.model = LlamaForCausalLM(
            LlamaConfig(**(target.config.to_dict() | DRAFT_SHAPE | {"dtype": "float32"}))
        )
        embeddings = target.model.embed_tokens.weight.float()
        _, _, directions = torch.linalg.svd(embeddings.T @ embeddings)
        projected = embeddings @ directions[: DRAFT_SHAPE["hidden_size"]].T
        with torch.no_grad():
            self.model.model.embed_tokens.weight.copy_(projected / projected.std() * 0.05)

    def loss(self, numbers: Tensor) -> Tensor:
        """Return the cross-entropy against the target's softmax in the answers."""
        counts = self.rows.answers[numbers][:, 1:]
        states = self.model.model(self.rows.ids[numbers]).last_hidden_state[:, :-1][counts]
        shown = self.known_and_others()
        logits = states @ self.model.lm_head.weight[shown].T
        with torch.no_grad():
            rows = self.output_rows(shown)
            final = self.rows.states[numbers][:, :-1][counts][:, -rows.shape[-1] :]
            goal = (final.float() @ rows.T).float().softmax(-1)
        return -(goal * log_softmax(logits.float(), -1)).sum(-1).mean()

    def guesses(self, numbers: Tensor) -> Iterator[Tensor]:
        best = self.model(self.rows.ids[numbers]).logits.argmax(-1)
        for step in range(4):
            yield best[:, 1 + step :]

    def write(self, out: pathlib.Path) -> None:
        self.model.save_pretrained(out)
        weights = load_file(out / "model.safetensors")
        save_file({k: v.bfloat16() for k, v in weights.items()}, out / "model.safetensors")
        config = json.loads((out / "config.json").read_text()) | {"dtype": "bfloat16"}
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        AutoTokenizer.from_pretrained(self.targets[0].config._name_or_path).save_pretrained(out)
        path = out / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        path.write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")))


def boundaries(target: LlamaForCausalLM) -> list[int]:
    """Return the boundaries between layers whose states EAGLE-3 reads by default."""
    layers = target.config.num_hidden_layers
    return [2, layers // 2, layers - 3]


def optimizers(trained: Trained) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices between layers, AdamW for vocabularies, norms and biases."""
    inner, rest = [], []
    for name, parameter in trained.named_parameters():
        outer = parameter.ndim < 2 or "lm_head" in name or "embed_tokens" in name
        (rest if outer else inner).append(parameter)
    muon = torch.optim.Muon(inner, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)]


def train(trained: Trained, rows: Rows, arguments: argparse.Namespace) -> int:
    """Train for some seconds, with warm-up and a cosine schedule; return the number of steps."""
    steppers = optimizers(trained)
    generator = torch.Generator().manual_seed(arguments.seed)
    numbers = rows.trained()
    start, step, mean = time.time(), 0, 0.0
    while (spent := time.time() - start) < arguments.seconds:
        cosine = 0.5 * (1 + math.cos(math.pi * spent / arguments.seconds))
        rate = arguments.peak * min(1, (step + 1) / 20) * (0.05 + 0.95 * cosine)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = rate
        picked = numbers[torch.randint(len(numbers), (arguments.batch,), generator=generator)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bfloat16):
            loss = trained.loss(picked)
        trained.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        step += 1
        mean += (loss.item() - mean) / min(step, 50)
        if step % 20 == 0:
            tokens = step * arguments.batch * rows.ids.shape[1]
            print(f"step {step} {spent:.0f}s loss {mean:.3f} tokens {tokens:,}", flush=True)
        if step % 200 == 0:
            trained.write(arguments.out)
    return step


@torch.no_grad()
def hits(trained: Trained, rows: Rows) -> list[float]:
    """Return for each of the draft tokens 1 to 4 the share of hits in held-out rows.

    A draft token is a hit if it is the target's likeliest token.
    """
    found, asked = [0] * 4, [0] * 4
    for numbers in rows.held_out().split(4):
        answers, best = rows.answers[numbers], rows.best[numbers]
        for step, guesses in enumerate(trained.guesses(numbers)):
            # The likeliest token behind place a + 1 + step, if it stands in an answer.
            places = slice(1 + step, -1)
            counts = answers[:, 2 + step :]
            right = guesses[:, : counts.shape[1]] == best[:, places]
            found[step] += int((right & counts).sum())
            asked[step] += int(counts.sum())
    return [round(a / b, 3) for a, b in zip(found, asked, strict=True)]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a drafter on chats that its target wrote.")
    parser.add_argument("name", choices=[*HEADS, "draft"])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/smollm2"))
    parser.add_argument("--count", type=int, default=6144, help="ids that the drafter learns")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument("--peak", type=float, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    arguments = parser.parse_args()
    arguments.peak = arguments.peak or PEAK_LEARNING_RATES[arguments.name]
    return arguments


def main() -> None:
    """Train one drafter, write it and measure it."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    target = LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16).eval()
    target.requires_grad_(False)
    rows = read(target, arguments.chats, arguments.work, boundaries(target))
    print(f"tokens: {rows.ids.numel():,}, of answers {int(rows.answers.sum()):,}", flush=True)
    if arguments.name == "draft":
        trained: Trained = TrainedModel(target, rows, arguments.count)
    else:
        trained = TrainedHead(arguments.name, target, rows, arguments.count)
    print("right drafts by place before:", *hits(trained, rows), flush=True)
    steps = train(trained, rows, arguments)
    trained.write(arguments.out)
    found = hits(trained, rows)
    print("right drafts by place:", *found, flush=True)
    tokens = steps * arguments.batch * rows.ids.shape[1]
    record = {"steps": steps, "tokens": tokens, "right_drafts_by_place": found}
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
