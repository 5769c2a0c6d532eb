"""Hidden states of vLLM's target, kept for drafters with a head.

For vLLM's own EAGLE-3 heads, vLLM's models can return the states that enter chosen layers. Here our
settings choose the layers. A forward's states stay on the device until its tokens are committed. So
vLLM's runner must be in the scheduler's process.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from outrider.errors import invalid
from outrider.heads.loading import load_projections
from outrider.lm.hidden_states import KeptStates
from outrider.protocol.draft_messages import FINAL_STATE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from verifier_svc.config import VerifierSettings

log = logging.getLogger(__name__)

_ELSEWHERE = (
    "needs vLLM's runner in the scheduler's process: with tensor parallelism, and on a CPU unless"
    " VLLM_ENABLE_V1_MULTIPROCESSING=0, vLLM computes in processes of its own. It must also run"
    " without --kv-sharing-fast-prefill, which computes no states of most prompt tokens"
)
# Maps the name of an engine's configuration to the states of its runner in this process.
_offered: WeakValueDictionary[str, VllmStates] = WeakValueDictionary()


class VllmStates(KeptStates):
    """The states of one runner. Other threads than vLLM's may call only `can_watch` and `watch`.

    The states are fixed before vLLM measures its memory and compiles the model. So no drafter can
    change the memory that is needed or the compiled model.
    """

    def __init__(self, runner: Any, settings: VerifierSettings) -> None:
        """Raises OutriderError(INVALID_VALUE) for states or projections that the model lacks."""
        super().__init__()
        config = runner.vllm_config
        self._runner = runner
        self.layer_count: int = config.model_config.get_total_num_hidden_layers()
        self.hidden_size: int = config.model_config.get_hidden_size()
        self.first_rows: Mapping[str, int] = {}
        """Maps a request of the last forward to the row of its first token."""
        self._watched: frozenset[int] = frozenset()
        self._failed = False
        self.projections = load_projections(
            settings.feature_projection,
            settings.target,
            runner.device,
            trust_remote_code=settings.trust_remote_code,
        )
        projected = [each.states for each in self.projections.values()]
        states = {*settings.feature_states}.union(*projected) - {FINAL_STATE}
        self._layers = tuple(sorted(states))
        if self._layers:
            self._keep_layers()

    def can_watch(self, states: Collection[int]) -> bool:
        """Return whether forwards keep these states; see `outrider.lm.hidden_states`."""
        return {FINAL_STATE, *self._layers}.issuperset(states)

    def watch(self, states: Collection[int]) -> None:
        """Keep these states of each forward that begins from now on."""
        self._watched = frozenset(states)

    def begin(self) -> frozenset[int]:
        """Free the states of the last forward; return the states to keep of the next forward."""
        self.clear()
        return self._watched

    def _as_pair(self, model: object, arguments: object, output: Any) -> Any:
        """Return the model's output as the pair that the runner takes apart.

        A few models lack the last layer's output. If the settings name only that output, such a
        model returns no list of states. vLLM's engine expects the list, and would end without it.
        """
        return output if isinstance(output, tuple) else (output, [])

    def _keep_layers(self) -> None:
        """Let vLLM's model return the states of the layers."""
        from vllm.model_executor.models.interfaces import supports_eagle3

        if self._runner.use_aux_hidden_state_outputs:
            message = "must be -1: vLLM's own drafter reads the states of other layers"
            raise invalid("feature_states", message)
        model = self._runner.get_model()
        if not supports_eagle3(model):
            message = f"must be -1: vLLM's {type(model).__name__} keeps no others"
            raise invalid("feature_states", message)
        # vLLM's models do not treat the input of layer 0 alike: some fail, and some overwrite it.
        if not set(self._layers) <= set(range(1, self.layer_count + 1)):
            message = f"must be -1 or in [1, {self.layer_count}], not {list(self._layers)}"
            raise invalid("feature_states", message)
        model.register_forward_hook(self._as_pair)
        model.set_aux_hidden_state_layers(self._layers)
        self._runner.use_aux_hidden_state_outputs = True
        # The layers become a part of the key of vLLM's cache of compiled models. Without this part,
        # vLLM could load a model that was compiled to return other states. A vision model's decoder
        # has a copy of the config.
        for part in (self._runner, *model.modules()):
            config = getattr(part, "vllm_config", None)
            if config is not None:
                config.additional_config["outrider_feature_states"] = self._layers

    def end(self, watched: Collection[int], tokens: Mapping[str, int]) -> None:
        """Keep the `watched` states of a forward; `tokens` counts each request's tokens in it."""
        try:
            self._keep(watched, tokens)
        # In vLLM's step, an exception would end vLLM's engine. Without states, only guesses suffer.
        except Exception:
            self.clear()
            if not self._failed:
                self._failed = True
                log.exception("no drafter gets features of a step; logged once")

    def _keep(self, watched: Collection[int], tokens: Mapping[str, int]) -> None:
        state = self._runner.execute_model_state
        if not watched or state is None:
            return
        found: dict[int, Any] = {FINAL_STATE: state.hidden_states}
        returned = state.aux_hidden_states or ()
        if len(returned) == len(self._layers):
            found |= zip(self._layers, returned, strict=True)
        # Without layers of ours, the returned states are for vLLM's own drafter.
        elif self._layers and not self._failed:
            self._failed = True
            log.error(
                "no drafter gets features: vLLM's model returned %d states, not those of layers %s",
                len(returned),
                self._layers,
            )
        self.kept = {number: found[number] for number in watched if number in found}
        # The second runner makes a batch for each step; the first runner always has the same batch.
        batch = getattr(state, "input_batch", None) or self._runner.input_batch
        rows: dict[str, int] = {}
        row = 0
        for request_id in batch.req_ids:
            rows[request_id] = row
            row += tokens[request_id]
        self.first_rows = rows

    def clear(self) -> None:
        """Free the states of the last forward."""
        self.kept = {}
        self.first_rows = {}


def offer(runner: Any, settings: VerifierSettings) -> None:
    """Let the scheduler in this process find the states of a runner that has loaded its model.

    Raises as `VllmStates` does.
    """
    states = VllmStates(runner, settings)
    runner.outrider_states = _offered[runner.vllm_config.instance_id] = states


def states_for(config: VllmConfig, settings: VerifierSettings) -> VllmStates | None:
    """Return the states that a scheduler's runner has offered; None if it has offered none.

    Raises OutriderError(INVALID_VALUE) if the settings need the states.
    """
    states = _offered.get(config.instance_id)
    if states is None:
        for name in ("feature_states", "feature_projection"):
            if getattr(settings, name):
                raise invalid(name, _ELSEWHERE)
        log.info("no drafter gets features: a head %s", _ELSEWHERE)
    return states
