"""vLLM's own drafter is one more drafter beside ours, and the plan chooses between them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import OutriderError
from tests.verifier.fake_vllm import Request, installed
from tests.verifier.test_vllm_hub import TestHub
from tests.verifier.test_vllm_scheduler import asked, scheduler_of, step
from verifier_svc.vllm.own_drafter import NAME


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture
def hub() -> TestHub:
    return TestHub()


def guess(scheduler: Any, request: Request, tokens: list[int]) -> None:
    """Give the scheduler the guesses of vLLM's own drafter for one request."""
    scheduler.update_draft_token_ids(
        SimpleNamespace(req_ids=[request.request_id], draft_token_ids=[tokens])
    )


def write(scheduler: Any, hub: TestHub, request: Request, guessed: list[int] | None = None) -> int:
    """Write a request's text, with right guesses unless `guessed` has others; count the steps."""
    scheduler.add_request(request)
    steps = 0
    while not request.is_finished():
        step(scheduler, hub.right)
        steps += 1
        if not request.is_finished():
            done = request.num_output_tokens
            guess(scheduler, request, guessed or hub.right[done : done + 4])
    assert request.output_token_ids == hub.right[: request.max_tokens]
    return steps


def test_its_guesses_are_verified_without_a_wait(hub: TestHub) -> None:
    scheduler = scheduler_of(hub, method="eagle3")
    began = hub.clock()
    assert write(scheduler, hub, asked("a")) <= 8
    assert hub.clock() == began
    drafter = hub.drafting.roster.connected[NAME]
    assert drafter.hello.family == "vllm-eagle3"
    assert drafter.accepted_count == drafter.verified_count > 20
    assert not hub.sequences


@pytest.mark.parametrize("guessed", [[99, 99], [-1] * 4, [10**6, 1]])
def test_beside_a_drafter_of_ours_the_better_draft_is_taken(
    hub: TestHub, guessed: list[int]
) -> None:
    """Wrong guesses, no guesses, and ids that the vocabulary lacks cost only their own draft."""
    scheduler = scheduler_of(hub, method="mtp")
    hub.add_drafter()
    assert write(scheduler, hub, asked("a"), guessed) <= 12
    assert hub.drafter is not None
    assert hub.drafter.accepted_count > 15
    assert NAME in hub.drafting.roster.connected
    assert not hub.failed


def test_guesses_that_nobody_asked_for_are_dropped(hub: TestHub) -> None:
    """Nobody asks for guesses behind a part of a prompt, or for an unknown request.

    Nor does anybody ask for the same guesses a second time.
    """
    scheduler = scheduler_of(hub, method="eagle3")
    request = asked("a")
    scheduler.add_request(request)
    request.is_prefill_chunk = True
    guess(scheduler, request, [1, 2])
    guess(scheduler, asked("unknown"), [1, 2])
    request.is_prefill_chunk = False
    guess(scheduler, request, [1, 2])
    step(scheduler, hub.right)
    for _ in range(20):
        guess(scheduler, request, hub.right[1:5])
    assert step(scheduler, hub.right) == {"a": hub.right[1:5]}
    assert NAME in hub.drafting.roster.connected


def test_a_fault_with_its_guesses_ends_the_drafting_alone(
    hub: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = scheduler_of(hub, method="eagle3")

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(scheduler._own_drafter, "take", fail)
    assert write(scheduler, hub, asked("a", 9)) == 9
    assert hub.failed


def test_a_stub_has_no_guesses(hub: TestHub) -> None:
    scheduler = scheduler_of(hub)
    assert write(scheduler, hub, asked("a", 9)) == 9
    assert NAME not in hub.drafting.roster.connected


@pytest.mark.parametrize(("ahead", "room"), [(0, 4), (4, 2)])
def test_drafts_leave_the_pages_that_its_guesses_will_need(
    hub: TestHub, ahead: int, room: int
) -> None:
    """The text has 6 tokens, and there are pages for 12."""
    scheduler = scheduler_of(hub, method="eagle3", num_lookahead_tokens=ahead, blocks=3)
    request = asked("a", 20)
    scheduler.add_request(request)
    step(scheduler, hub.right)
    # vLLM holds pages for the guesses too.
    held = -(-(request.num_tokens + ahead) // 4)
    scheduler.kv_cache_manager.block_pool.get_num_free_blocks = lambda: 3 - held
    guess(scheduler, request, hub.right[1:5])
    assert step(scheduler, hub.right) == {"a": hub.right[1 : 1 + room]}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"method": "suffix"}, "speculative_config"),
        ({"method": "eagle3", "draft_sample_method": "probabilistic"}, "speculative_config"),
        ({"method": "eagle3", "async_scheduling": True}, "async_scheduling"),
    ],
)
def test_a_drafter_beside_which_ours_cannot_draft_is_refused(
    hub: TestHub, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(OutriderError) as refused:
        scheduler_of(hub, **settings)
    assert refused.value.field == field
