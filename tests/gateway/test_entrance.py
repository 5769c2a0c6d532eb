"""What comes in over HTTP is refused unread if there is no room, and else worked on in turns."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any, cast

import pytest

from gateway.generation.admission import Admission, Permit
from gateway.http.entrance import Entrance, Turns, arrival_in
from outrider.errors import OutriderError, Reason

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Room:
    """Room for some sequences of one model, in place of an `Admission`."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.tenants: Counter[str] = Counter()

    def only_model(self) -> str:
        return "model"

    def enter(self, *_: object) -> Permit:
        if self.tenants.total() == self.left:
            raise OutriderError(Reason.OVERLOADED, "full", retry_after_s=3.0)
        return Permit(self.tenants, "", 1, math.inf)


class Site:
    """An entrance with `room`, before an application that reads the body in its turn."""

    def __init__(self, room: int) -> None:
        self.room = Room(room)
        self.events: list[str] = []
        self._entrance = Entrance(self._app, cast(Admission, self.room))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        arrival = arrival_in(scope)
        assert arrival is not None
        self.events.append("passed on")
        await receive()
        await arrival.turn()
        if scope["fails"]:
            raise ValueError("a wrong body")
        arrival.counted()

    async def ask(self, *, fails: bool = False) -> None:
        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                self.events.append(f"{message['status']} {headers[b'retry-after'].decode()}")

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "fails": fails,
            "outrider.identity": type("Identity", (), {"tenant": ""}),
        }
        await self._entrance(scope, receive, send)


async def test_a_bursts_refusals_leave_before_the_work_on_the_others() -> None:
    site = Site(room=2)
    await asyncio.gather(*(site.ask() for _ in range(5)))
    assert site.events == ["429 3"] * 3 + ["passed on"] * 2


async def test_the_room_of_a_request_is_given_back_however_it_ends() -> None:
    site = Site(room=1)
    with pytest.raises(ValueError, match="a wrong body"):
        await site.ask(fails=True)
    await site.ask()
    assert not site.room.tenants
    assert site.events == ["passed on"] * 2


async def in_turn(turns: Turns, tenant: str, order: list[str]) -> None:
    await turns.enter(tenant)
    order.append(tenant)
    await asyncio.sleep(0)
    turns.leave()


async def test_tenants_come_in_turn() -> None:
    turns = Turns(1)
    order: list[str] = []
    await asyncio.gather(*(in_turn(turns, tenant, order) for tenant in "aaaabcb"))
    assert "".join(order) == "aabcaba"


async def test_a_request_that_leaves_while_it_waits_costs_no_turn() -> None:
    turns = Turns(1)
    order: list[str] = []
    await turns.enter("first")
    waiting = [asyncio.create_task(in_turn(turns, name, order)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.leave()
    waiting[1].cancel()  # in the moment in which it gets its turn
    await asyncio.wait(waiting)
    assert order == ["c"]
    await asyncio.wait_for(turns.enter("next"), 1.0)
