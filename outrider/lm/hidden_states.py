"""Keeps chosen hidden states of a `transformers` model's forward, for drafters with a head.

A state is named by a number: k for the residual stream that enters layer k, the number of layers
for the output of the last layer, and `FINAL_STATE` for the state after the final norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from outrider.lm.streams import SharedRows
from outrider.protocol.draft_messages import FINAL_STATE
from outrider.sampling.tensors import on

_COPIED_ROWS = 1024


class FeatureProjection(Protocol):
    """Turns a token's states into fewer numbers, as `outrider.heads.projection` does for a head."""

    @property
    def states(self) -> Sequence[int]:
        """The states that the projection reads, in the order in which it reads them."""

    @property
    def projected_width(self) -> int:
        """The length of the vector that the projection computes from a token's states."""

    def __call__(self, features: torch.Tensor, /) -> torch.Tensor:
        """Project rows of the `states`; return [R, projected_width], of the rows' own type."""


class KeptStates:
    """The states that a model's last forward kept, and rows of them for drafters."""

    def __init__(self) -> None:
        self.kept: Mapping[int, torch.Tensor] = {}
        """Maps each state to its rows [T, H], one for each token of the forward."""
        self.projections: Mapping[str, FeatureProjection] = {}
        """Maps names to the projections that `pick_states` can apply to the states."""

    @torch.inference_mode()
    def pick_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> torch.Tensor:
        """Return the kept `states` of the last forward's `rows`, in memory of their own.

        The result [R, F] of `dtype` has each row's states in the order of `states` or, with
        `projection`, the projected states. The method does not wait for the device.
        """
        kept = [self.kept[state] for state in states]
        index = on(kept[0].device, rows, torch.int64)
        numbers = torch.cat([state.index_select(0, index) for state in kept], dim=1)
        numbers = numbers.to(getattr(torch, dtype))
        return self.projections[projection](numbers) if projection else numbers

    def share_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> SharedRows:
        """Return what `pick_states` returns, for use by a thread with another stream."""
        return SharedRows.of(self.pick_states(states, rows, dtype, projection))

    def copy_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> bytes:
        """Copy to the host what `pick_states` returns: row after row, little endian.

        Copies 1,024 rows at a time, and waits for the device each time, so that a long prompt needs
        little memory on the device.
        """
        pieces = [rows[at : at + _COPIED_ROWS] for at in range(0, len(rows), _COPIED_ROWS)]
        picked = (self.pick_states(states, piece, dtype, projection).cpu() for piece in pieces)
        return b"".join(piece.view(torch.uint8).numpy().tobytes() for piece in picked)


class HiddenStates:
    """Keeps states by hooks on one model.

    Without watched states there are no hooks and no costs.
    """

    def __init__(self, model: Any) -> None:
        """Find the decoder and its layers.

        Raises LookupError for a model that does not have its layers in one list.
        """
        config = model.config.get_text_config(decoder=True)
        self._size: int = config.hidden_size
        self._decoder: torch.nn.Module = model.get_decoder()
        lists = [each for each in self._decoder.modules() if isinstance(each, torch.nn.ModuleList)]
        layers = [each for each in lists if len(each) == config.num_hidden_layers]
        if not layers:
            raise LookupError(f"no list has its {config.num_hidden_layers} layers")
        self._layers = layers[0]
        self._parameter: torch.Tensor = next(self._decoder.parameters())
        self.watched: tuple[int, ...] = ()
        """The states that forwards keep, in ascending order."""
        self._handles: list[Any] = []
        self._kept: dict[int, torch.Tensor] = {}

    def watch(self, states: Collection[int]) -> None:
        """Keep these states from now on, and no others."""
        for handle in self._handles:
            handle.remove()
        self._kept.clear()
        self.watched = tuple(sorted(set(states)))
        self._handles = [self._hook(state) for state in self.watched]

    def empty(self, token_count: int) -> torch.Tensor:
        """Return memory for a state of `token_count` tokens."""
        return self._parameter.new_empty(token_count, self._size)

    def put(self, state: int, rows: torch.Tensor) -> None:
        """Keep a state [T, H] if it is watched, for forwards that bypass the model's layers."""
        if state in self.watched:
            self._kept[state] = rows

    def take(self) -> Mapping[int, torch.Tensor]:
        """Return the watched states of the last forward, each [T, H] for all its tokens."""
        kept = self._kept
        self._kept = {}
        return kept

    def _hook(self, state: int) -> Any:
        def keep(output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._kept[state] = hidden.squeeze(0)

        if state == FINAL_STATE:
            return self._decoder.register_forward_hook(
                lambda module, args, output: keep(output.last_hidden_state)
            )
        if state == 0:
            return self._layers[0].register_forward_pre_hook(
                lambda module, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        return self._layers[state - 1].register_forward_hook(
            lambda module, args, output: keep(output)
        )
