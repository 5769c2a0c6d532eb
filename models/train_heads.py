"""Train a small head for the bundled target and write it to `heads/NAME` beside this file.

A head reads the target's hidden states and drafts its next tokens. It learns the target's own
distribution over several steps of its own drafting, on the training text of `train_pair.py` and, if
wanted, on text that the target continued. The target's features are computed on the fly. The name
`table` trains nothing; it measures the heads that are there beside the bundled draft model.

EAGLE-3 learns from about 700 tokens in a second of one core. Where other processes use the cores,
OMP_WAIT_POLICY=PASSIVE makes that three times cheaper. A GPU wants `--device cuda --batch 32`.

Usage: train_heads.py NAME SECONDS --stdlib DIR --docs DIR [--init] [--peak LR] [--work DIR]
Where `--work` has the ids of the text, `--stdlib` and `--docs` are not read.
"""

import argparse
import functools
import json
import math
import pathlib
import random
import time
from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load_file, save_file
from small_heads import BLOCK, CONTEXT, HEADS, PROMPT, Drafts, Features, Head
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from train_pair import encode, make_chat, read_documents, with_masks
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
PEAK_LEARNING_RATE = 3e-3


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return Gumbel noise: the arg max of logits + noise is a draw of their softmax."""
    return -torch.empty(shape).exponential_(generator=generator).log()


@torch.no_grad()
def continue_text(
    target: LlamaForCausalLM, prompts: Tensor, length: int, noise: Tensor | None
) -> Tensor:
    """Return prompts [B, P] with `length` more tokens of the target, [B, P + length].

    `noise` [B, P + length, V] is added to the logits of each token; None takes the likeliest.
    """
    cache = DynamicCache(config=target.config)
    ids, new = prompts, prompts
    for place in range(prompts.shape[1], prompts.shape[1] + length):
        logits = target(input_ids=new, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        if noise is not None:
            logits = logits.float() + noise[:, place]
        new = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
    return ids


def cut(data: Tensor, count: int, width: int, generator: torch.Generator) -> Tensor:
    """Return pieces [count, width] from random places of the text."""
    # The generator is the CPU's, so that every device reads the same text.
    starts = torch.randint(len(data) - width, (count, 1), generator=generator)
    return data[(starts + torch.arange(width)).to(data.device)].long()


def chat_prompts(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> Tensor:
    """Return prompts [count, PROMPT]: the last tokens of some chats up to an answer's begin."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        text = "".join(make_chat(rng) for _ in range(8))
        text += make_chat(rng).partition("<|assistant|>")[0] + "<|assistant|>"
        rows.append(tokenizer.backend_tokenizer.encode(text).ids[-PROMPT:])
    return torch.tensor(rows)


def generate(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Tensor, batches: int
) -> Tensor:
    """Return rows [96 * batches, CONTEXT] that the target continued from prompts of 64 tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for n in range(batches):
        prompts = cut(data, 80, PROMPT, generator)
        prompts = torch.cat([prompts, chat_prompts(tokenizer, 16, 100 + n).to(data.device)])
        # Temperatures 0, 0.7 and 1 in turns: noise of that size.
        noise = (0.0, 0.7, 1.0)[n % 3] * gumbel((96, CONTEXT, 4096), generator).to(data.device)
        rows.append(continue_text(target, prompts, CONTEXT - PROMPT, noise))
        print(f"generated batch {n + 1} of {batches}", flush=True)
    return torch.cat(rows) if rows else data.new_zeros(0, CONTEXT)


class Batches:
    """Batches [size, CONTEXT] of ids: of the text and of what the target generated, in turns."""

    def __init__(self, data: Tensor, generated: Tensor, size: int, seed: int) -> None:
        self.data, self.generated, self.size = data, generated, size
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0

    def text(self) -> Tensor:
        return cut(self.data, self.size, CONTEXT, self.generator)

    def own(self) -> Tensor:
        rows = torch.randint(len(self.generated), (self.size,), generator=self.generator)
        return self.generated[rows.to(self.generated.device)].long()

    def next(self) -> Tensor:
        self.count += 1
        return self.own() if len(self.generated) and self.count % 2 else self.text()


@torch.no_grad()
def expected_frequencies(target: LlamaForCausalLM, batches: Batches) -> Tensor:
    """Return how often the target would draw each id [V], over 24 batches."""
    return sum(Features(target, batches.next()).logits.softmax(-1).sum((0, 1)) for _ in range(24))


class Muon(torch.optim.Optimizer):
    """Steps of one spectral norm for matrices, which learn faster than AdamW's on few tokens.

    torch.optim.Muon computes in bfloat16, which CPUs without such units do fifty times slower.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 0.05)
                update = orthogonal(torch.lerp(parameter.grad, momentum, 0.95))
                # The scale gives the elements the size of AdamW's steps.
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - 0.1 * group["lr"])
                parameter.add_(update, alpha=-scale * group["lr"])


def orthogonal(x: Tensor) -> Tensor:
    """Return the matrix of the same singular vectors whose singular values are about 1."""
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x if wide else x.T


def build_optimizers(head: Head) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices between layers, AdamW for vocabularies, norms and biases."""
    inner, rest = [], []
    for name, parameter in head.named_parameters():
        outer = name.startswith(("lm_head", "markov_head", "confidence_head"))
        (rest if outer or parameter.ndim < 2 else inner).append(parameter)
    return [Muon(inner), torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)]


def train(
    head: Head,
    target: LlamaForCausalLM,
    batches: Batches,
    seconds: float,
    peak: float,
    save: Callable[[int], None],
) -> int:
    """Train for `seconds`, with warm-up and a cosine schedule; return the number of steps."""
    optimizers = build_optimizers(head)
    losses: list[Tensor] = []
    embed = target.model.embed_tokens
    start = time.time()
    step = 0
    while (spent := time.time() - start) < seconds:
        cosine = 0.5 * (1 + math.cos(math.pi * spent / seconds))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1, (step + 1) / 20) * (0.05 + 0.95 * cosine)
        loss = head.loss(embed, Features(target, batches.next()))
        head.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        losses = [*losses[-49:], loss.detach()]
        if step % 10 == 0:
            mean = torch.stack(losses).mean().item()
            print(f"step {step} {spent:.0f}s loss {loss.item():.3f} mean {mean:.3f}", flush=True)
        if step % 50 == 0:
            save(step)
    return step


def write(head: Head, target: LlamaForCausalLM, out: pathlib.Path, record: object) -> None:
    """Write the head in bfloat16 with its configuration and training record."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu()
        for name, tensor in head.state_dict().items()
    }
    # A process that is killed while it writes leaves the earlier file whole.
    fresh = out / "model.fresh"
    save_file(tensors, fresh, metadata={"format": "pt"})
    fresh.replace(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(head.config(target), indent=1) + "\n")
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


class Trial:
    """Held-out text, and what the target makes of held-out prompts, with the noise of its draws.

    `text` [16, 192]. `greedy` and `sampled` [32, 192]: 24 prompts of text, then 8 of chats, each of
    64 tokens, and 128 tokens of the target. `noise` [32, 192, V]: that of the draws of `sampled`.
    """

    def __init__(self, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Tensor):
        generator = torch.Generator().manual_seed(7)
        prompts = cut(data, 24, PROMPT, generator)
        prompts = torch.cat([prompts, chat_prompts(tokenizer, 8, 9).to(data.device)])
        self.text = cut(data, 16, PROMPT + 128, generator)
        noise = gumbel((32, PROMPT + 128, target.config.vocab_size), generator)
        self.noise = noise.to(data.device)
        self.greedy = continue_text(target, prompts, 128, None)
        self.sampled = continue_text(target, prompts, 128, self.noise)


def walk(hits: Tensor, depth: int) -> float:
    """Return the tokens per forward when each forward verifies `depth` drafts.

    `hits` [B, T, 7]: whether the draft of place d after last committed token n is the text's,
    given that those before it are. A walk begins at the prompt's last token.
    """
    tokens = forwards = 0
    for row in hits[..., :depth].int().cumprod(-1).sum(-1).tolist():
        n = PROMPT - 1
        while n + depth + 1 < len(row):
            n += row[n] + 1
            forwards += 1
        tokens += n - (PROMPT - 1)
    return tokens / forwards


def hits_of(drafted: Tensor, goal: Tensor) -> Tensor:
    """Return whether draft d of each place n is goal[n + 1 + d], [B, T, depth]."""
    depth = drafted.shape[-1]
    padded = torch.cat([goal, goal.new_full((len(goal), depth), -2)], dim=1)
    return torch.stack(
        [drafted[..., d] == padded[:, 1 + d : 1 + d + goal.shape[1]] for d in range(depth)], dim=-1
    )


def by_place(hits: Tensor) -> str:
    """Return the share of hits at each of the 7 places where all are drafted, in percent."""
    rows = hits[:, PROMPT - 1 : hits.shape[1] - 8].float().mean((0, 1))
    return " ".join(f"{100 * share:.0f}" for share in rows.tolist())


def table_row(name: str, drafts: Drafts, target: LlamaForCausalLM, trial: Trial) -> str:
    """Return one row of the table of `TITLES` for a drafter."""
    features = Features(target, trial.text)
    follow = features.logits.argmax(-1).roll(1, dims=1)
    cells = [by_place(hits_of(drafts(features, None), follow))]
    greedy = hits_of(drafts(Features(target, trial.greedy), None), trial.greedy)
    cells.append(by_place(greedy.int().cumprod(-1)))
    sampled = hits_of(drafts(Features(target, trial.sampled), trial.noise), trial.sampled)
    for hits in (greedy[:24], greedy[24:], sampled):
        cells.append(" / ".join(f"{walk(hits, depth):.2f}" for depth in (4, 7)))
    return f"| {name} | " + " | ".join(cells) + " |"


TITLES = (
    "| drafter | held-out text | chain | greedy text | greedy chats | temperature 1 |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def draft_model(features: Features, noise: Tensor | None) -> Tensor:
    """Return the drafts [B, T, 7] of the bundled draft model."""
    model = LlamaForCausalLM.from_pretrained(HERE / "draft", dtype=torch.float32).eval()
    model.to(features.ids.device)
    with torch.no_grad():
        logits = log_softmax(model(input_ids=features.ids).logits, -1)
    if noise is not None:
        logits[:, :-1] += noise[:, 1:]
    # The model sees ids alone, so its draft of a place is the same whoever drafted before it.
    best = nn.functional.pad(logits.argmax(-1), (0, 6), value=-1)
    return best.unfold(1, 7, 1)


@torch.no_grad()
def parallel_model(features: Features, noise: Tensor | None) -> Tensor:
    """Return the drafts [B, T, 7] of the bundled PARD model after PROMPT tokens."""
    model = LlamaForCausalLM.from_pretrained(HERE / "pard", dtype=torch.float32).eval()
    ids = features.ids
    model.to(ids.device)
    count = ids.shape[1]
    anchors = torch.arange(PROMPT - 1, count, device=ids.device)
    found, positions = with_masks(model, ids, anchors, BLOCK - 1)
    logits = log_softmax(found, -1)
    if noise is not None:
        known = positions + 1 < count
        logits[:, known] += noise[:, positions[known] + 1]
    best = logits.argmax(-1)
    drafted = ids.new_full((*ids.shape, BLOCK), -1)
    drafted[:, PROMPT - 1 :, 0] = best[:, PROMPT - 1 : count]
    drafted[:, PROMPT - 1 :, 1:] = best[:, count:].unflatten(1, (-1, BLOCK - 1))
    return drafted


def table(
    target: LlamaForCausalLM,
    trial: Trial,
    heads: Mapping[str, Head],
    drafters: Mapping[str, Drafts],
) -> None:
    """Print the table of some drafters and of heads."""
    rows = dict(drafters)
    for name, head in heads.items():
        rows[name] = functools.partial(head.drafts, target.model.embed_tokens, 7)
    print(TITLES)
    for name, drafts in rows.items():
        print(table_row(name, drafts, target, trial), flush=True)


def read_head(name: str, heads: pathlib.Path) -> Head:
    """Return the head that `write` wrote."""
    head: Head = HEADS[name]()
    head.load_state_dict(load_file(heads / name / "model.safetensors"))
    return head


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a head for the bundled target.")
    parser.add_argument("name", choices=[*HEADS, "table"])
    parser.add_argument("seconds", type=float, nargs="?", default=0.0)
    parser.add_argument("--until", type=float, help="train to this Unix time in place of SECONDS")
    parser.add_argument("--stdlib")
    parser.add_argument("--docs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4, help=f"rows of {CONTEXT} tokens in a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--init", action="store_true", help="continue from the head that is there")
    parser.add_argument("--peak", type=float, default=PEAK_LEARNING_RATE)
    parser.add_argument(
        "--generated", type=int, default=0, help="batches of 96 rows of the target's own text"
    )
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/heads"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "heads")
    return parser.parse_args()


def load_text(
    arguments: argparse.Namespace, target: LlamaForCausalLM
) -> tuple[PreTrainedTokenizerFast, dict[str, Tensor]]:
    """Return the tokenizer, and ids: `text` to train on, `held_out`, and `generated` [N, CONTEXT].

    The folder `work` keeps the ids for the next head.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "target")
    kept = arguments.work / f"text-{arguments.generated}.safetensors"
    if not kept.exists():
        ids = read_text(arguments, tokenizer)
        text = ids["text"].to(target.device)
        ids["generated"] = generate(target, tokenizer, text, arguments.generated).cpu()
        arguments.work.mkdir(parents=True, exist_ok=True)
        save_file({name: part.to(torch.int16) for name, part in ids.items()}, kept)
    return tokenizer, {name: part.to(target.device) for name, part in load_file(kept).items()}


def read_text(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Tensor]:
    """Return the ids of the texts to train on and of the held-out texts."""
    if not (arguments.stdlib and arguments.docs):
        raise SystemExit(f"{arguments.work} has no ids: give --stdlib and --docs")
    texts, held_out = read_documents(arguments.stdlib, arguments.docs)
    rng = random.Random(0)
    chats = [make_chat(rng) for _ in range(24_000)]
    texts += ["".join(chats[i : i + 8]) for i in range(0, len(chats), 8)]
    random.Random(1).shuffle(texts)
    ids = {"text": encode(tokenizer, texts), "held_out": encode(tokenizer, held_out)}
    print(f"tokens: train {len(ids['text']):,} held out {len(ids['held_out']):,}", flush=True)
    return ids


def train_head(
    arguments: argparse.Namespace, target: LlamaForCausalLM, ids: dict[str, Tensor]
) -> Head:
    """Train one head, write it and return it."""
    out = arguments.out / arguments.name
    batch = arguments.batch
    before = {"steps": 0, "tokens": 0}
    if arguments.init:
        head = read_head(arguments.name, arguments.out).to(target.device)
        before = json.loads((out / "training.json").read_text())
        batches = Batches(ids["text"], ids["generated"], batch, seed=before["steps"])
    else:
        head = HEADS[arguments.name]().to(target.device)
        batches = Batches(ids["text"], ids["generated"], batch, seed=2)
        head.start(target, expected_frequencies(target, batches))

    def save(steps: int) -> None:
        tokens = before["tokens"] + steps * batch * CONTEXT
        write(head, target, out, {"steps": before["steps"] + steps, "tokens": tokens})

    seconds = arguments.until - time.time() if arguments.until else arguments.seconds
    save(train(head, target, batches, seconds, arguments.peak, save))
    return head


def main() -> None:
    """Train one head, write it and measure it; or measure all."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    # On a GPU, products of 19 bits: three times as precise as bfloat16's, and not much slower.
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    target = LlamaForCausalLM.from_pretrained(HERE / "target", dtype=torch.float32).eval()
    target.requires_grad_(False).to(arguments.device)
    tokenizer, ids = load_text(arguments, target)
    if arguments.name == "table":
        names = [n for n in HEADS if (arguments.out / n / "model.safetensors").exists()]
        heads = {name: read_head(name, arguments.out).to(target.device) for name in names}
        drafters = {"draft model": draft_model}
        if (HERE / "pard").exists():
            drafters["pard"] = parallel_model
    else:
        heads = {arguments.name: train_head(arguments, target, ids)}
        drafters = {}
    table(target, Trial(target, tokenizer, ids["held_out"]), heads, drafters)


if __name__ == "__main__":
    main()
