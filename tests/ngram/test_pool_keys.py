"""Keys in Redis: a text's n-grams share a slot, and nobody can make a key without the secret."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from drafter_svc.pools.keys import BUCKETS, PoolKeys, is_index, read_secret
from outrider.errors import OutriderError

SECRET = b"a secret of some length"
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16)
NAMED = st.tuples(st.text(max_size=9), st.text(max_size=9), TOKENS)


@given(TOKENS, st.text(max_size=20))
def test_all_n_grams_that_end_a_text_share_a_slot_with_their_index(
    tokens: list[int], tenant: str
) -> None:
    keys = PoolKeys(SECRET).tenant(tenant, "fingerprint")
    ngrams = [tokens[-size:] for size in range(len(tokens), 0, -1)]
    found = keys.keys(ngrams)
    assert len(set(found)) == len(ngrams)
    assert {key_slot(key) for key in found} == {key_slot(keys.index(tokens))}
    assert all(key.startswith(keys.index(tokens)) and not is_index(key) for key in found)
    assert is_index(keys.index(tokens))


def test_tenants_n_grams_are_spread_over_different_slots() -> None:
    slots = [
        {key_slot(PoolKeys(SECRET).tenant(name, "f").index([token])) for token in range(1000)}
        for name in ("a", "b", "c")
    ]
    assert len(set.union(*slots)) > 2.5 * BUCKETS


@given(NAMED, NAMED)
@example(("ab", "c", [1]), ("a", "bc", [1]))
def test_no_two_n_grams_tokenizers_or_tenants_share_a_key(
    one: tuple[str, str, list[int]], other: tuple[str, str, list[int]]
) -> None:
    keys = [
        PoolKeys(SECRET).tenant(tenant, fingerprint).keys([ngram])[0]
        for tenant, fingerprint, ngram in (one, other)
    ]
    assert (keys[0] == keys[1]) == (one == other)


@given(NAMED, NAMED)
@example(("ab", "c", [1]), ("a", "bc", [1]))
def test_no_two_texts_tokenizers_or_tenants_share_a_digest(
    one: tuple[str, str, list[int]], other: tuple[str, str, list[int]]
) -> None:
    digests = []
    for tenant, fingerprint, text in (one, other):
        digests.append(PoolKeys(SECRET).texts(tenant, fingerprint).digest(text))
        ngrams = PoolKeys(SECRET).tenant(tenant, fingerprint)
        assert not ngrams.keys([text])[0].endswith(digests[-1])
    assert (digests[0] == digests[1]) == (one == other)


@given(NAMED)
def test_a_tenants_texts_share_a_slot_with_their_index_and_are_found_by_its_pattern(
    named: tuple[str, str, list[int]],
) -> None:
    tenant, fingerprint, text = named
    keys = PoolKeys(SECRET).texts(tenant, fingerprint)
    key = keys.index + keys.digest(text)
    assert key_slot(key) == key_slot(keys.index)
    assert is_index(keys.index)
    assert not is_index(key)
    assert key.startswith(PoolKeys(SECRET).pattern(tenant).rstrip(b"*"))
    for other in ((tenant, fingerprint + "x"), (tenant + "x", fingerprint)):
        assert PoolKeys(SECRET).texts(*other).index != keys.index
    assert PoolKeys(b"another secret, as long").texts(tenant, fingerprint).index != keys.index


def test_no_tenant_name_gives_access_to_the_public_pool() -> None:
    private = PoolKeys(SECRET)
    public = PoolKeys(SECRET, public=True)
    expected = public.tenant("a", "f").keys([[1]])
    assert public.tenant("b", "f").keys([[1]]) == expected
    for name in ("", "public", "a"):
        assert private.tenant(name, "f").keys([[1]]) != expected
        assert private.pattern(name) != public.pattern(name)


def tenant_of(key: bytes) -> bytes:
    return key.partition(b"{")[2].partition(b".")[0]


def test_keys_cannot_be_computed_without_the_secret() -> None:
    ours = PoolKeys(SECRET).tenant("tenant", "f").keys([[1, 2]])[0]
    theirs = PoolKeys(b"another secret, as long").tenant("tenant", "f").keys([[1, 2]])[0]
    assert tenant_of(ours) != tenant_of(theirs)
    assert ours[-16:] != theirs[-16:]
    assert b"tenant" not in ours


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"short\n", "must hold at least 16 bytes"),
        (b"", "at least 16"),
    ],
)
def test_a_bad_secret_is_refused_and_the_setting_named(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OutriderError, match=message) as caught:
        read_secret(path)
    assert str(caught.value).startswith("pool-secret-file ")
