"""Runs a decoder-only `transformers` model on packed slices of sequences, over a paged KV cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from outrider.errors import OutriderError
from outrider.lm import attention, support, trial
from outrider.lm.batch_invariance import reason_against
from outrider.lm.checkpoint import read_checkpoint
from outrider.lm.cpu.decoder import CpuDecoder
from outrider.lm.cpu.weights import dtype_for_int8, int8_is_faster, optimize_for_cpu
from outrider.lm.devices import find_device
from outrider.lm.forward_check import worse_than_own
from outrider.lm.gpu import memory
from outrider.lm.gpu.graphs import Bounds, Graphs, buckets
from outrider.lm.gpu.inputs import CacheShape
from outrider.lm.hidden_states import HiddenStates, KeptStates
from outrider.lm.layout import BatchLayout, SequenceSlice, StaticLayout
from outrider.lm.trial import OwnLogits, Texts
from outrider.protocol.draft_messages import FINAL_STATE
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from outrider.sampling.tensors import on, triton_works
from outrider.tokenizer import end_token_ids, token_ids

if TYPE_CHECKING:
    from outrider.lm.gpu.fused_layers import FusedForward
    from outrider.lm.gpu.move_tokens import TokenMover

__all__ = ["Bounds", "ModelRunner", "SequenceSlice"]

log = logging.getLogger(__name__)

# The number of tokens in a page. Small pages waste little, and no attention kernel is faster with
# larger pages.
_PAGE_SIZE = 16
_CPU_CACHE_BYTES = 2**30
_SEQUENCES_AT_FULL_CONTEXT = 64
# The share of a GPU's free memory that is kept for steps that are not measured: without `bounds`,
# or if the attention kernel does not support the model.
_UNMEASURED_STEP = 0.15


class ModelRunner(KeptStates):
    """A model and its KV cache. Not thread-safe: only one thread may call `forward`."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_id: str = "",
        *,
        page_size: int | None = None,
        page_count: int | None = None,
        bounds: Bounds | None = None,
        memory_share: float = 0.9,
        fused_layers: bool = True,
    ) -> None:
        """Serve a loaded `transformers` model; `load` explains the parameters.

        `fused_layers` lets a GPU compute with fewer kernels, where that is possible. Raises
        OutriderError(INVALID_VALUE) for a model that cannot be served.
        """
        super().__init__()
        self.model_id = model_id
        self._name = model_id or type(model).__name__
        self._model = cast(Any, model.eval())
        self.page_size = page_size or _PAGE_SIZE
        with support.refusals(self._name, "reading its configuration"):
            self._read_model()
        texts = support.make_texts(
            self._name, self.vocab_size, self.context_length, self._layers, self.page_size
        )
        own = support.own_logits(self._model, self._name, self.vocab_size, texts)
        self._states = _hidden_states(self._model)
        self._graphs: Graphs | None = None
        self.decoder: CpuDecoder | None = None
        """Replaces the model's own forward on a CPU, if the C decoder supports the model."""
        self.fused: FusedForward | None = None
        """Replaces the model's own forward on a GPU, if our kernels support the model."""
        if fused_layers and triton_works(self.device):
            # Layers are fused before the memory of a step is measured.
            self._fuse(texts, own)
        self.page_count = page_count or self._default_page_count(bounds, memory_share)
        # The texts of the trial may need more pages than a small cache has.
        pages = max(self.page_count, texts.page_count)
        longest = min(self._most_slots, pages * self.page_size)
        if self._takes_graphs():
            self._graphs = self._make_graphs(longest, spare_page=pages)
            # The padding of a graph's batch goes to an additional page after the last page.
            pages += 1
        self._allocate(pages, longest)
        self._token_mover = self._make_token_mover()
        if self.device.type == "cpu":
            self.decoder = CpuDecoder.of(self._model, self._layers, self.page_size)
        self.rows_may_differ: str | None = None
        """Why a row's bits may depend on the other rows of its forward; None if they do not."""
        if self.decoder is None:
            self.rows_may_differ = reason_against(self._model, self._layers.values())
        if self.rows_may_differ is not None:
            log.info(
                "%s may answer otherwise when asked again: %s", self._name, self.rows_may_differ
            )
        self._compare(texts, own)
        # `capture` compares the graphs' logits too.
        self._trial = (texts, own) if self._graphs is not None else None

    def _read_model(self) -> None:
        """Set what depends only on the model, and let its layers attend over our cache."""
        config = self._model.config.get_text_config(decoder=True)
        parameter = next(self._model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.vocab_size: int = config.vocab_size
        self.layer_count: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.parallel_token_id = support.parallel_token_id(self._name, config)
        """A PARD model's token for tokens that are not guessed yet; None for other models."""
        self._model.set_attn_implementation(attention.NAME)
        self._layers = attention.install(self._model)
        support.find_shapes(self._model, self._name, config, self._layers)
        self.context_length = support.context_length(self._name, config)
        # The model has no logits for ids from `vocab_size` on, so it can neither draw nor ban them.
        self.eos_token_ids = tuple(
            token for token in _eos_token_ids(self._model, config) if token < self.vocab_size
        )

    @property
    def _most_slots(self) -> int:
        """The maximum number of a sequence's slots: a tree may need more slots than positions."""
        return self.context_length + MAX_TREE_TOKENS

    def _allocate(self, pages: int, max_seq_len: int) -> None:
        for layer in self._layers.values():
            layer.allocate(pages, self.page_size, max_seq_len, self.dtype, self.device)

    def _fuse(self, texts: Texts, own: OwnLogits) -> None:
        """Let a GPU compute with fewer kernels, unless these give other logits than the model."""
        # This import is not at the top, because not every machine has Triton.
        from outrider.lm.gpu.fused_layers import FusedForward, join_projections

        fused = FusedForward.of(self._model, self._name, self._layers, self._states)
        if fused is None:
            join_projections(self._model)
            return
        self.fused = fused
        pages = texts.page_count
        self._allocate(pages, min(self._most_slots, pages * self.page_size))
        try:
            self._compare(texts, own)
            self._compare_rounding(fused)
        except OutriderError as cause:
            log.warning("the model's own layers are used; with fused layers, %s", cause.message)
            self.fused = None

    def _compare_rounding(self, fused: FusedForward) -> None:
        """Raise OutriderError(INVALID_VALUE) if `fused` is less exact than the model's forward."""
        with support.refusals(self._name):
            why = worse_than_own(
                self._model,
                self._layers,
                self.page_size,
                lambda layout: fused.logits(layout.token_ids, layout.positions, layout),
            )
        if why is not None:
            raise support.unsupported(self._name, f"its trial was {why}")

    def _compare(self, texts: Texts, own: OwnLogits) -> None:
        """Raise OutriderError(INVALID_VALUE) if `forward` gives other logits than the model."""
        with support.refusals(self._name):
            why = trial.disagreement(self._model, texts, own, self.forward)
        if why is not None:
            raise support.unsupported(self._name, why)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "auto",
        int8: bool | None = False,
        device: str = "auto",
        page_size: int | None = None,
        page_count: int | None = None,
        bounds: Bounds | None = None,
        memory_share: float = 0.9,
        threads: int | None = None,
        trust_remote_code: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> ModelRunner:
        """Load a model from a directory or GGUF file, or by its hub id.

        Never opens a pickle. `dtype` is auto (the checkpoint's), float32, bfloat16 or float16.
        `int8` keeps the weights of layers in int8 and computes in bfloat16, on a CPU only; None
        does so for a bfloat16 model if `int8_is_faster`. `threads` is torch's number of threads on
        a CPU. `page_size` is in tokens. By default `page_count` is as large as memory allows, but
        no larger than 64 sequences of the full context need; on a CPU the cache then takes at most
        1 GiB.

        On a GPU, the process takes at most `memory_share` of the card's memory: for the weights,
        the cache, and the largest step within `bounds`. This step is measured; `capture` must get
        the same bounds. `progress` receives a line for each stage. Raises OutriderError:
        MODEL_NOT_FOUND, or INVALID_VALUE for a model or setting that cannot be served.
        """
        report = progress or (lambda detail: None)
        if threads is not None:
            torch.set_num_threads(threads)
        target_device = find_device(device)
        if int8:
            dtype = dtype_for_int8(dtype, target_device)
        report(f"reading {model}")
        loaded = read_checkpoint(model, dtype, trust_remote_code)
        report(f"moving the weights to {target_device}")
        if target_device.type == "cpu":
            if int8 is None:
                int8 = int8_is_faster() and _is_bfloat16(loaded)
            optimize_for_cpu(loaded, int8=int8)
        else:
            # CUDA streams and graphs belong to the current device, which is a thread's own setting.
            torch.cuda.set_device(target_device)
        runner = cls(
            cast(Any, loaded).to(target_device),
            model,
            page_size=page_size,
            page_count=page_count,
            bounds=bounds,
            memory_share=memory_share,
        )
        # Only the files decide which tokens end a text. If they name none, the loaded configuration
        # still has the default of the model's type.
        runner.eos_token_ids = end_token_ids(model, runner.vocab_size)
        return runner

    def warm_up(self) -> None:
        """Run forwards of several sizes, so that the first request does not wait for new kernels.

        Overwrites the pages from 0 on.
        """
        for count in (1, 2, 4, 8, 16, 32, 64):
            if count <= min(self.context_length, self.page_count * self.page_size):
                pages = list(range(-(-count // self.page_size)))
                self.forward([SequenceSlice([0] * count, 0, pages, 1)])
                if count > 1 and self.device.type == "cuda":
                    # The GPU's kernel is compiled a second time for batches with trees.
                    self.forward([SequenceSlice([0] * count, 0, pages, 1, [0])])

    @torch.inference_mode()
    def capture(self, bounds: Bounds) -> None:
        """Warm up; then capture CUDA graphs for forwards within `bounds`.

        Captures nothing unless all layers use the GPU kernel. If graphs give other logits than the
        model, all graphs are dropped, with a warning. Raises torch.AcceleratorError if the device
        failed.
        """
        self.warm_up()
        if self._graphs is None:
            return
        self._graphs.capture(bounds)
        if self._trial is None:
            return
        try:
            self._compare(*self._trial)
        except OutriderError as cause:
            log.warning("no CUDA graph is used: %s", cause.message)
            self._graphs = None
        self._trial = None

    @property
    def cache_bytes(self) -> int:
        """The size of the KV cache, on the model's device."""
        return sum(array.nbytes for array in self._cache_arrays())

    @property
    def graph_count(self) -> int:
        """The number of CUDA graphs."""
        return self._graphs.count if self._graphs is not None else 0

    @property
    def graph_memory_bytes(self) -> int:
        """The device memory that the CUDA graphs take."""
        return self._graphs.memory_bytes if self._graphs is not None else 0

    def can_watch(self, states: Collection[int]) -> bool:
        """Return whether forwards can keep these hidden states; see `outrider.lm.hidden_states`.

        If `capture` has made graphs, forwards can keep only the states that were watched during the
        capture.
        """
        if self._states is None:
            return False
        if self._graphs is not None and self._graphs.count:
            return set(states) <= set(self._graphs.states)
        return set(states) <= {FINAL_STATE, *range(self.layer_count + 1)}

    def watch(self, states: Collection[int]) -> None:
        """Keep these hidden states of each forward from now on; `can_watch` must allow them."""
        if self._states is not None:
            self._states.watch(states)

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run a forward of the slices, and write their keys and values to the cache.

        Return float32 logits [R, V] for the last `logit_count` tokens of each slice, in order. The
        next call may overwrite the logits.
        """
        if self._graphs is not None:
            logits = self._graphs.forward(slices)
            if logits is not None:
                self.kept = self._graphs.kept(sum(len(part.token_ids) for part in slices))
                return logits
        layout = self._layout(slices)
        states = self._states
        if self.decoder is not None:
            watched = states.watched if states is not None else ()
            logits, kept = self.decoder.forward(layout, watched)
            self.kept = dict(zip(watched, kept, strict=True))
            return logits
        logits = self._call(layout.token_ids, layout.positions, layout, layout.logits_indices)
        if states is not None:
            self.kept = states.take()
        return logits.float()

    @torch.inference_mode()
    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values between slots of the flattened cache, in every layer.

        Each source is read before it is overwritten. For this, a sequence's moves must be in
        ascending order, and each must go towards the sequence's start.
        """
        if not sources:
            return
        if self._token_mover is not None:
            self._token_mover.move(sources, targets)
            return
        from_slots = on(self.device, sources, torch.int64)
        to_slots = on(self.device, targets, torch.int64)
        for array in self._cache_arrays():
            array.index_copy_(0, to_slots, array.index_select(0, from_slots))

    def _call(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout | StaticLayout,
        rows: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """Run a forward of the whole model; return the logits of `rows` (0: of all rows)."""
        if self.fused is not None:
            return self.fused.logits(token_ids, positions, layout, rows)
        for layer in self._layers.values():
            layer.layout = layout
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _takes_graphs(self) -> bool:
        """True if forwards can be captured.

        No layer may gather pages, because gathering depends on the sequences' lengths.
        """
        return all(layer.supports_kernel(self.device) for layer in self._layers.values())

    def _make_token_mover(self) -> TokenMover | None:
        """Return a mover of tokens in all layers at once; None where Triton does not run."""
        if not triton_works(self.device):
            return None
        # This import is not at the top, because not every machine has Triton.
        from outrider.lm.gpu.move_tokens import TokenMover

        return TokenMover.of(self._cache_arrays())

    def _cache_arrays(self) -> list[torch.Tensor]:
        """Return the keys and values of all layers, each as [slots, heads, size]."""
        return [array for layer in self._layers.values() for array in layer.arrays]

    def _make_graphs(self, max_seq_len: int, spare_page: int) -> Graphs:
        pages_each = -(-max_seq_len // self.page_size)
        shape = CacheShape(self.page_size, pages_each, spare_page)
        return Graphs(self._call, shape, self.vocab_size, self.device, self._states)

    @property
    def continues(self) -> bool:
        """True if `continue_greedily` can decode several tokens in one call."""
        return self.decoder is not None or self.graph_count > 0

    def continue_greedily(
        self, slices: Sequence[SequenceSlice], count: int, limit: int
    ) -> list[list[int]] | None:
        """Decode `count` tokens greedily for slices of one token each, by one call.

        The call runs the C decoder, or CUDA graphs one after the other with one wait at their end.
        Return `count` rows, each with the likeliest token below `limit` for every slice; None if
        there is neither a C decoder nor a graph for this batch, or if a slice has more than one
        token or a tree. For a small model, one call instead of many saves more time than the
        model's forwards take.
        """
        found = self._continue(slices, count, limit, keep_logits=False)
        return None if found is None else found[0].tolist()

    def continue_with_logits(
        self, slices: Sequence[SequenceSlice], count: int, limit: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Like `continue_greedily`, without a wait for the device.

        Return the tokens [count, B] and the logits [count, B, V] that they come from.
        """
        return self._continue(slices, count, limit, keep_logits=True)

    @torch.inference_mode()
    def _continue(
        self, slices: Sequence[SequenceSlice], count: int, limit: int, *, keep_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if any(
            len(part.token_ids) != 1 or part.logit_count != 1 or part.parents for part in slices
        ):
            return None
        if self.decoder is not None:
            return self.decoder.continue_greedily(
                self._layout(slices), count, limit, keep_logits=keep_logits
            )
        if self._graphs is None:
            return None
        return self._graphs.continue_greedily(slices, count, limit, keep_logits=keep_logits)

    def _layout(self, slices: Sequence[SequenceSlice]) -> BatchLayout:
        return BatchLayout(slices, self.page_size, self.device)

    def _default_page_count(self, bounds: Bounds | None, memory_share: float) -> int:
        """Return how many pages fit into memory, at most what 64 sequences of full context need."""
        shapes = [layer.shape for layer in self._layers.values() if layer.shape is not None]
        numbers = sum(shape.heads * (shape.key_size + shape.value_size) for shape in shapes)
        page_bytes = numbers * self.dtype.itemsize * self.page_size
        if self.device.type == "cuda":
            budget = self._gpu_cache_bytes(bounds, memory_share, page_bytes)
        else:
            free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
            budget = min(_CPU_CACHE_BYTES, free_bytes // 4)
        useful = _SEQUENCES_AT_FULL_CONTEXT * -(-self.context_length // self.page_size)
        return max(1, min(budget // page_bytes, useful))

    def _gpu_cache_bytes(self, bounds: Bounds | None, memory_share: float, page_bytes: int) -> int:
        """Return the bytes for the cache on a GPU; raise INVALID_VALUE if no page fits."""
        step = 0
        if bounds is not None and self._takes_graphs():
            step = self._largest_step_bytes(bounds)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        own = torch.cuda.memory_reserved(self.device)
        if not step:
            # Without the kernel a step's memory depends on the texts, so it is not measured.
            # Without `bounds`, the largest step is not known.
            step = int(free * _UNMEASURED_STEP)
        budget = memory.cache_bytes(total, free, own, step, memory_share)
        if budget < page_bytes:
            sizes = [f"{size / 2**30:.1f} GiB" for size in (total * memory_share, own, free, step)]
            raise support.unsupported(
                self._name,
                "no memory is left for its KV cache: of its gpu_memory_share ({}) it has taken {}; "
                "{} are free, and its largest step takes {}".format(*sizes),
            )
        return budget

    def _largest_step_bytes(self, bounds: Bounds) -> int:
        """Measure the memory of the largest step, over a cache of one page."""
        self._allocate(1, self._most_slots)
        graphs = self._make_graphs(self._most_slots, spare_page=0)
        try:
            return memory.largest_step_bytes(graphs.largest_forward(bounds), len(buckets(bounds)))
        except torch.OutOfMemoryError as cause:
            why = f"the GPU has no memory for a step of {bounds.tokens} tokens"
            raise support.unsupported(self._name, why) from cause


def _is_bfloat16(model: torch.nn.Module) -> bool:
    return all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())


def _hidden_states(model: Any) -> HiddenStates | None:
    try:
        return HiddenStates(model)
    # A model's own code may lack the parts that `HiddenStates` reads. Without these parts the model
    # is served without features.
    except (LookupError, AttributeError) as reason:
        log.info("no drafter gets features of %s: %s", type(model).__name__, reason)
        return None


def _eos_token_ids(model: Any, config: Any) -> tuple[int, ...]:
    """Return the ids that end a text.

    The generation config comes first, because chat models add their end-of-turn ids there.
    """
    configs = (getattr(model, "generation_config", None), config)
    found = [getattr(each, "eos_token_id", None) for each in configs]
    return token_ids("the model's eos_token_id", *found) or ()
