"""No schema makes us open a file or an address, and no refusal quotes a reference's target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.grammar.schema_versions import DRAFTS, Draft, check_form, validator
from tests.shared.grammar_texts import compiler, schema, takes
from tests.shared.secret_traps import SECRET, Traps, set_traps

DRAFT_3 = "http://json-schema.org/draft-03/schema"


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traps]:
    with set_traps(tmp_path_factory.mktemp("secret")) as found:
        yield found


def forms(uri: str) -> dict[str, Any]:
    """Return schemas that refer to `uri`, one for each keyword that holds schemas in any draft."""
    to = {"$ref": uri}
    alone = (
        *("not", "if", "then", "else", "contains", "propertyNames", "additionalItems", "items"),
        *("additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
        *("extends", "targetSchema", "x-unknown"),
    )
    lists = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "extends", "disallow", "type")
    maps = (
        *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
        *("dependencies", "x-schemas"),
    )
    return {
        "$ref": to,
        "$ref beside others": {"type": "string", "minLength": 1, **to},
        "$dynamicRef": {"$dynamicRef": uri},
        "$recursiveRef": {"$recursiveRef": uri},
        "$schema": {"$schema": uri, "type": "string"},
        "$id": {"$id": uri, "$ref": "#/nope"},
        "$id within": {"properties": {"a": {"$id": uri, "$ref": "#/nope"}}},
        "id": {"id": uri, "$ref": "#/nope"},
        "id within": {"items": {"id": uri, "$ref": "#/nope"}},
        "$schema within": {"items": {"$schema": DRAFT_3, "disallow": [to]}},
        "unknown $schema within": {"items": {"$schema": uri}},
        "$vocabulary": {"$vocabulary": {uri: True}, "type": "string"},
        "links": {"links": [{"href": uri, "rel": "self", "targetSchema": to}]},
        "into an unknown keyword": {"$ref": "#/x-unknown", "x-unknown": {"items": to}},
        "into data": {"$ref": "#/const", "const": to},
        **{f"{name}, alone": {"type": "string", name: to} for name in alone},
        **{f"{name}, in a list": {name: [to, {}]} for name in lists},
        **{f"{name}, by name": {name: {"a": to}} for name in maps},
    }


# These places hold schemas that are in use, so their contents are always checked.
NESTS: tuple[Any, ...] = (
    lambda inner: inner,
    lambda inner: {"type": "object", "properties": {"const": inner}, "required": ["const"]},
    lambda inner: {"type": "array", "items": {"anyOf": [inner, {"type": "null"}]}},
)


def refusal(value: Any) -> OutriderError | None:
    """Return why a schema is refused; None if it is compiled."""
    try:
        compiler().compile(schema(value))
    except OutriderError as error:
        return error
    return None


@pytest.mark.parametrize("draft", [*DRAFTS, DRAFT_3, None])
def test_no_reference_of_any_draft_is_followed_out_of_a_schema(
    draft: str | None, traps: Traps
) -> None:
    refused = 0
    for uri in traps.places:
        for nest in NESTS:
            for name, form in forms(uri).items():
                whole = nest(form)
                if draft is not None and "$schema" not in whole:
                    whole = {"$schema": f"{draft}#", **whole}
                error = refusal(whole)
                refused += error is not None
                assert error is None or error.field == "grammar.json_schema", name
                assert SECRET not in str(error), name
                assert traps.read == [], (name, whole)
    # A few forms contain the place's name without a reference to the place; they are not refused.
    assert refused > 0.85 * len(traps.places) * len(NESTS) * len(forms(""))


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_the_validators_themselves_retrieve_nothing(draft: Draft, traps: Traps) -> None:
    """The test guards against a keyword that the walk over schemas forgets."""
    for uri in traps.places:
        check_form({"$ref": uri}, draft, "field")
        reference = {"allOf": [{"$ref": uri}]}
        with pytest.raises(Exception, match=r"Unresolvable|PointerToNowhere") as failed:
            validator(reference, draft).is_valid("text")
        assert SECRET not in str(failed.value)
    assert traps.read == []


@pytest.mark.parametrize("keyword", ["const", "enum", "default", "examples", "example"])
def test_what_looks_like_a_reference_in_data_is_data(keyword: str, traps: Traps) -> None:
    for uri in traps.places:
        data = {"$ref": uri, "$schema": DRAFT_3, "$id": uri, "disallow": [{"$ref": uri}]}
        value = [data] if keyword in ("enum", "examples") else data
        compiled = compiler().compile(schema({"type": "object", keyword: value}))
        assert takes(compiled, json.dumps(data))
    assert traps.read == []


def test_a_property_may_be_named_as_a_reference() -> None:
    named = {"type": "object", "properties": {"$ref": {"type": "string"}, "$schema": {}}}
    assert takes(compiler().compile(schema(named)), '{"$ref": "http://example.com/x"}')


@pytest.mark.parametrize("name", [DRAFT_3, "https://example.com/my-draft", "", 3, None, {}])
def test_a_schema_of_an_unknown_draft_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(OutriderError, match=r"has \$schema .*draft-07.*2020-12") as refused:
        compiler().compile(schema({"$schema": name, "type": "string"}))
    assert refused.value.field == "grammar.json_schema"
