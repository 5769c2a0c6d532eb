"""A step is divided between tenants; a tenant that has used little goes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import GREEDY, make_engine
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.step_shares import max_min
from verifier_svc.engine.tenant_use import TenantUse
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence as SequenceState

STEP_S = 0.001
ROW_S = 0.0005


def submit(engine: Engine, tenant: str, count: int, prompt: int = 2) -> list[SequenceState]:
    request = TokenRequest([1, *[2] * (prompt - 1)], 50, GREEDY, tenant=tenant)
    return [engine.submit(request, lambda chunk: None) for _ in range(count)]


def busy_engine(*, prompt: int = 2, floods: Sequence[str] = ("flood",)) -> Engine:
    """Return an engine with 16 sequences of flooding tenants that have run for a second."""
    config = EngineConfig(max_sequences=32, max_batch_tokens=64)
    engine, _ = make_engine(eos_bias=-99, config=config, page_count=2000, clock=lambda: 0.0)
    for name in floods:
        submit(engine, name, 16 // len(floods), prompt)
        engine.scheduler.use.charge({name: 1}, 1.0, 0.0)
    return engine


def next_step(engine: Engine, row_s: float = ROW_S) -> list[ScheduledSequence]:
    for count in (1, 32):
        engine.cost.calibrate(count, count, STEP_S + count * row_s)
    engine.cost.prompt_token_s = row_s
    return engine.scheduler.next({})


def served(engine: Engine) -> Counter[str]:
    """Return each tenant's tokens in the next step. A step takes STEP_S, and ROW_S for each row."""
    tokens: Counter[str] = Counter()
    for scheduled in next_step(engine):
        tokens[scheduled.sequence.request.tenant] += len(scheduled.token_ids)
    return tokens


def test_each_tenant_pays_for_its_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[dict[str, float]] = []

    def charge(rows: Mapping[str, int], seconds: float, now: float) -> None:
        charged.append(
            {tenant: seconds * count / sum(rows.values()) for tenant, count in rows.items()}
        )

    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(), clock=lambda: 0.0)
    monkeypatch.setattr(engine.scheduler.use, "charge", charge)
    submit(engine, "first", 1, prompt=2)
    submit(engine, "first", 1, prompt=4)
    engine.scheduler.admit()
    engine.scheduler.charge(next_step(engine), 1.0, 0.0)
    [second] = submit(engine, "second", 1, prompt=2)
    engine.scheduler.admit()
    engine.scheduler.charge(next_step(engine), 1.0, 0.0)
    engine.cancel(second)
    engine.scheduler.charge(next_step(engine), 1.0, 0.0)
    assert charged == [{"first": 1.0}, {"first": 0.75, "second": 0.25}, {"first": 1.0}]


@given(st.dictionaries(st.text(max_size=2), st.integers(0, 50), max_size=6), st.integers(0, 120))
def test_shares_are_max_min(wanted: dict[str, int], total: int) -> None:
    shares = max_min(wanted, total)
    assert all(shares[name] <= count for name, count in wanted.items())
    assert sum(shares.values()) == min(total, sum(wanted.values()))
    for name, count in wanted.items():
        if shares[name] < count:
            assert shares[name] >= max(shares.values()) - 1, "no tenant has more than one row more"


def test_two_tenants_with_long_prompts_share_the_tokens_of_a_step() -> None:
    config = EngineConfig(max_batch_tokens=64)
    engine, _ = make_engine(eos_bias=-99, config=config, page_count=2000)
    submit(engine, "a", 5, prompt=100)
    submit(engine, "b", 1, prompt=100)
    assert served(engine) == {"a": 32, "b": 32}


@pytest.mark.parametrize("floods", [("flood",), ("flood", "another")], ids=len)
@pytest.mark.parametrize("prompt", [2, 40])
def test_floods_add_a_quarter_to_the_steps_of_a_light_tenant(
    prompt: int, floods: tuple[str, ...]
) -> None:
    engine = busy_engine(prompt=prompt, floods=floods)
    if prompt == 2:
        engine.step()  # the flood's sequences decode from here on
    submit(engine, "light", 2)
    tokens = served(engine)
    assert tokens["light"] == 4
    alone_s = engine.cost.prompts_s(4)
    added_s = sum(tokens[name] for name in floods) * ROW_S + (STEP_S if prompt == 2 else 0.0)
    assert added_s <= 0.25 * alone_s + STEP_S


def test_steps_stay_short_while_another_tenant_may_come_back() -> None:
    """A tenant that comes back waits for the step's end, so the flood's sequences take turns."""
    engine = busy_engine()
    engine.step()
    engine.scheduler.use.charge({"light": 1}, 0.001, 0.0)
    first = [each.sequence.id for each in next_step(engine)]
    then = [each.sequence.id for each in next_step(engine)]
    longest_s = 4 * (STEP_S + ROW_S)
    assert STEP_S + len(first) * ROW_S <= longest_s + STEP_S + ROW_S
    assert 1 < len(first) < 16
    assert then[0] == first[-1] + 1
    assert {*first, *then, *[each.sequence.id for each in next_step(engine)]} == {*range(1, 17)}


def test_a_step_without_room_for_a_flood_does_not_begin_its_turns_again() -> None:
    engine = busy_engine()
    engine.step()
    submit(engine, "light", 3)
    engine.scheduler.admit()
    engine.step()

    def flood_ids(row_s: float) -> list[int]:
        step = next_step(engine, row_s)
        return [each.sequence.id for each in step if each.sequence.request.tenant == "flood"]

    turns = []
    for _ in range(4):
        turns += flood_ids(ROW_S)
        assert flood_ids(4 * ROW_S) == []
    assert len(turns) == len(set(turns)) == 4


def test_a_tenant_that_uses_its_share_is_not_light() -> None:
    use = TenantUse()
    use.charge({"a": 1, "b": 9}, 1.0, 0.0)
    assert use.light({"a", "b"}) == {"a"}
    assert use.light({"b"}) == frozenset()
    use.charge({"a": 1}, 0.5, 0.0)
    assert use.light({"a", "b"}) == frozenset()


def test_use_decays_and_is_forgotten() -> None:
    use = TenantUse()
    use.charge({"a": 1}, 1.0, 0.0)
    use.charge({"b": 1}, 1.0, 3.0)
    assert use.light({"a", "b"}) == {"a"}, "after 3 s, a's second counts less"
    assert use.expects({"b"})
    use.charge({"b": 1}, 0.3, 5.0)
    assert not use.expects({"b"})
