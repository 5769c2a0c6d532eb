"""Keeps answers of the Responses API for a while, in memory, separately for each tenant.

An answer is kept with its whole conversation. A piece of JSON that several answers of a tenant
share is held once, so a long conversation costs its length once, not once for each answer.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_TENANT_BYTES = 16 * 1024 * 1024
MAX_TENANT_ANSWERS = 1024
MAX_BYTES = 64 * 1024 * 1024
MAX_ANSWERS = 8192
# The bytes that Python's objects take besides the JSON: for each piece, for each use of a piece,
# and for each answer.
_PIECE_BYTES = 200
_USE_BYTES = 16
_ANSWER_BYTES = 2000
# Parameters that are often the same in the answers of a tenant. Each is a separate piece.
_APART = ("tools", "instructions")


class _Kept(NamedTuple):
    """A kept answer."""

    members: Sequence[bytes]
    """Pieces of JSON with all members of the response object except its output."""
    before: Sequence[bytes]
    """The items of the conversation before the answer."""
    output: Sequence[bytes]
    deltas: bytes
    """The lengths of the deltas in which the output's texts grew, as JSON."""
    item_ids: Sequence[str]

    @property
    def pieces(self) -> list[bytes]:
        """All pieces of JSON."""
        return [*self.members, *self.before, *self.output, self.deltas]

    @property
    def own_bytes(self) -> int:
        """The bytes that the answer takes besides its pieces."""
        return _ANSWER_BYTES + _USE_BYTES * (len(self.before) + len(self.output))


class _Tenant:
    """The answers of one tenant. The most recently used answer is last."""

    def __init__(self) -> None:
        self.answers: OrderedDict[str, _Kept] = OrderedDict()
        self.items: dict[str, tuple[str, bytes]] = {}
        """Maps the id of an answer's item to the answer's id and the item."""
        self.byte_count = 0
        self._uses: Counter[bytes] = Counter()

    def add(self, answer_id: str, kept: _Kept) -> None:
        """Keep an answer whose id is new."""
        self.answers[answer_id] = kept
        for item_id, item in zip(kept.item_ids, kept.output, strict=True):
            self.items[item_id] = (answer_id, item)
        for piece in kept.pieces:
            if self._uses[piece] == 0:
                self.byte_count += len(piece) + _PIECE_BYTES
            self._uses[piece] += 1
        self.byte_count += kept.own_bytes

    def remove(self, answer_id: str) -> None:
        """Drop an answer, and the pieces that no other answer uses."""
        kept = self.answers.pop(answer_id)
        for item_id in kept.item_ids:
            del self.items[item_id]
        for piece in kept.pieces:
            self._uses[piece] -= 1
            if self._uses[piece] == 0:
                del self._uses[piece]
                self.byte_count -= len(piece) + _PIECE_BYTES
        self.byte_count -= kept.own_bytes


class ResponseStore:
    """Keeps answers of all tenants. If it is full, new answers replace the least recently used.

    A tenant cannot read another tenant's answers, and keeps at most MAX_TENANT_BYTES and
    MAX_TENANT_ANSWERS.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        # All answers, keyed by tenant and id. The most recently used answer is last.
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.byte_count = 0
        """About how much memory the answers take."""

    def add(
        self,
        tenant: str,
        response: dict[str, Any],
        before: Sequence[bytes],
        deltas: Sequence[Sequence[int]] = (),
    ) -> None:
        """Keep a response and the items before it, if they fit together in MAX_TENANT_BYTES.

        `deltas` has the lengths of the deltas of each item of its output. The response takes the
        place of a response with the same id.
        """
        self.remove(tenant, response["id"])
        others = {k: v for k, v in response.items() if k not in ("output", *_APART)}
        members = [_members(others), *(_members({name: response[name]}) for name in _APART)]
        output = [_json(item) for item in response["output"]]
        item_ids = [item["id"] for item in response["output"]]
        kept = _Kept(members, before, output, _json(deltas), item_ids)
        alone = _Tenant()
        alone.add(response["id"], kept)
        if alone.byte_count > MAX_TENANT_BYTES:
            return
        of_tenant = self._tenants.setdefault(tenant, _Tenant())
        self.byte_count -= of_tenant.byte_count
        of_tenant.add(response["id"], kept)
        self.byte_count += of_tenant.byte_count
        self._order[tenant, response["id"]] = None
        self._make_room(tenant)

    def _make_room(self, tenant: str) -> None:
        """Drop the least recently used answers until the tenant's and the overall limits hold."""
        of_tenant = self._tenants[tenant]
        answers = of_tenant.answers
        while of_tenant.byte_count > MAX_TENANT_BYTES or len(answers) > MAX_TENANT_ANSWERS:
            self.remove(tenant, next(iter(answers)))
        while self.byte_count > MAX_BYTES or len(self._order) > MAX_ANSWERS:
            self.remove(*next(iter(self._order)))

    def remove(self, tenant: str, answer_id: str) -> bool:
        """Drop an answer; return False if no such answer is kept."""
        if (tenant, answer_id) not in self._order:
            return False
        del self._order[tenant, answer_id]
        of_tenant = self._tenants[tenant]
        self.byte_count -= of_tenant.byte_count
        of_tenant.remove(answer_id)
        self.byte_count += of_tenant.byte_count
        if not of_tenant.answers:
            del self._tenants[tenant]
        return True

    def _used(self, tenant: str, answer_id: str) -> _Kept | None:
        """Return a kept answer, and mark it as the most recently used."""
        if (tenant, answer_id) not in self._order:
            return None
        self._order.move_to_end((tenant, answer_id))
        answers = self._tenants[tenant].answers
        answers.move_to_end(answer_id)
        return answers[answer_id]

    def conversation(self, tenant: str, answer_id: str) -> Sequence[bytes] | None:
        """Return the items of a conversation up to a kept answer, as JSON.

        Return None if the answer is not kept.
        """
        kept = self._used(tenant, answer_id)
        return None if kept is None else [*kept.before, *kept.output]

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an item of a kept answer as JSON; None if the item is not kept."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None or item_id not in of_tenant.items:
            return None
        answer_id, item = of_tenant.items[item_id]
        self._used(tenant, answer_id)
        return item

    def before(self, tenant: str, answer_id: str) -> Sequence[bytes] | None:
        """Return the items of the conversation before a kept answer, as JSON.

        Return None if the answer is not kept.
        """
        kept = self._used(tenant, answer_id)
        return None if kept is None else kept.before

    def deltas(self, tenant: str, answer_id: str) -> list[list[int]]:
        """Return the lengths of the deltas of each item of a kept answer's output."""
        kept = self._used(tenant, answer_id)
        found: list[list[int]] = [] if kept is None else json.loads(kept.deltas)
        return found

    def response(self, tenant: str, answer_id: str) -> bytes | None:
        """Return a kept response as JSON; None if it is not kept."""
        kept = self._used(tenant, answer_id)
        if kept is None:
            return None
        output = b'"output":[' + b",".join(kept.output) + b"]"
        return b"{" + b",".join((*kept.members, output)) + b"}"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _members(values: dict[str, Any]) -> bytes:
    """Return the object's members without its braces."""
    return _json(values)[1:-1]
