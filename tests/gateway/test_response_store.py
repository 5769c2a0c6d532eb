"""The kept answers of the Responses API take bounded memory, and each tenant has its own bounds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.http.responses import store as responses_store
from gateway.http.responses.store import ResponseStore

Json = dict[str, Any]


def response(name: str, text: str = "x") -> Json:
    item = {"id": f"msg_{name}", "type": "message", "text": text}
    return {"id": name, "tools": [], "instructions": "Be kind.", "output": [item], "status": "ok"}


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(responses_store, name, value)


def test_a_kept_answer_is_found_whole_by_its_id_and_its_items() -> None:
    store = ResponseStore()
    store.add("a", response("r1"), [b"1", b"2"])
    assert json.loads(store.response("a", "r1") or b"") == response("r1")
    [one, two, item] = store.conversation("a", "r1") or ()
    assert (one, two, json.loads(item)) == (b"1", b"2", response("r1")["output"][0])
    assert store.item("a", "msg_r1") == item
    for nothing in (store.response, store.conversation, store.item):
        assert nothing("b", "r1") is None
        assert nothing("a", "r2") is None


def test_an_answer_of_the_same_id_takes_the_others_place() -> None:
    store = ResponseStore()
    store.add("a", response("r1", "old"), [])
    before = store.byte_count
    store.add("a", response("r1", "new"), [])
    assert b"new" in (store.response("a", "r1") or b"")
    assert store.byte_count == before


@pytest.mark.parametrize("limited", ["MAX_TENANT_BYTES", "MAX_TENANT_ANSWERS"])
def test_a_tenants_oldest_answers_make_room_and_no_others(
    monkeypatch: pytest.MonkeyPatch, limited: str
) -> None:
    limit(monkeypatch, **{limited: 3 if "ANSWERS" in limited else 10_000})
    store = ResponseStore()
    store.add("b", response("r0"), [])
    for turn in range(9):
        store.add("a", response(f"r{turn}"), [])
        # Reading an answer makes it the newest, so it is kept.
        assert store.item("a", "msg_r0") is not None
    assert store.response("a", "r8") is not None
    assert store.response("a", "r1") is None
    assert store.item("a", "msg_r1") is None
    assert store.response("b", "r0") is not None


@pytest.mark.parametrize("limited", ["MAX_BYTES", "MAX_ANSWERS"])
def test_the_oldest_answers_of_all_tenants_make_room(
    monkeypatch: pytest.MonkeyPatch, limited: str
) -> None:
    limit(monkeypatch, **{limited: 3 if "ANSWERS" in limited else 10_000})
    store = ResponseStore()
    for turn in range(9):
        store.add(f"tenant {turn}", response("r"), [])
        assert store.byte_count <= responses_store.MAX_BYTES
    kept = [turn for turn in range(9) if store.response(f"tenant {turn}", "r")]
    assert kept == list(range(9 - len(kept), 9))
    assert 1 < len(kept) < 9


def test_an_answer_larger_than_a_tenants_share_drops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, MAX_TENANT_BYTES=10_000)
    store = ResponseStore()
    store.add("a", response("r1"), [])
    store.add("a", response("r2", "x" * 10_000), [])
    assert store.response("a", "r2") is None
    assert store.response("a", "r1") is not None


def test_a_conversation_costs_its_own_length_and_not_the_sum_over_its_answers() -> None:
    store = ResponseStore()
    before: list[bytes] = []
    for turn in range(100):
        before = [*before, str(turn).encode() * 5_000]
        store.add("a", response(f"r{turn}"), before)
    assert sum(map(len, before)) < store.byte_count < 2 * sum(map(len, before))


def test_the_count_of_bytes_is_exact_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, MAX_TENANT_BYTES=20_000, MAX_BYTES=50_000, MAX_TENANT_ANSWERS=6)
    rng = random.Random(5)
    store = ResponseStore()
    names = [(f"tenant {i % 5}", f"r{i}") for i in range(60)]
    for _ in range(400):
        tenant, name = rng.choice(names)
        if rng.random() < 0.7:
            before = [bytes([rng.randrange(256)]) * rng.randrange(400)] * rng.randrange(8)
            store.add(tenant, response(name, "x" * rng.randrange(2_000)), before)
        else:
            store.remove(tenant, name)
        again = ResponseStore()
        for tenant, name in names:
            kept, items = store.response(tenant, name), store.conversation(tenant, name)
            if kept is not None and items is not None:
                again.add(tenant, json.loads(kept), items[:-1])
        assert again.byte_count == store.byte_count <= 50_000
    for tenant, name in names:
        store.remove(tenant, name)
    assert store.byte_count == 0
