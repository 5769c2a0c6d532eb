"""Valid and invalid requests that schemathesis makes from /openapi.json.

Each answer has a documented status. Each error has the form of its API, and in OpenAI's form an
error of one field names this field. The gateway answers a good request afterwards.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import create_app
from outrider.errors import Reason
from tests.gateway.gateway_rig import Rig, echo_within_limit
from tests.gateway.test_access import settings, unused
from tests.hostile_messages import fuzzing
from tests.waiting import until

# In the quick suite, test_document.py and test_hostile_callers.py send fewer kinds of requests.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

DOCUMENT: Any = create_app(settings(), *unused()).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
# Operations without parameters and body are left out: there is only one request for each.
OPERATIONS = [
    (method.upper(), path)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if SCHEMA[path][method].body or any(SCHEMA[path][method].iter_parameters())
]
# Errors of the whole request, not of one field.
WITHOUT_FIELD = (
    Reason.MALFORMED_REQUEST,
    Reason.REQUEST_TOO_LARGE,
    Reason.ROUTE_NOT_FOUND,
    Reason.METHOD_NOT_ALLOWED,
)
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def cases(method: str, path: str) -> st.SearchStrategy[schemathesis.Case[Any]]:
    """Return a strategy of valid and invalid requests of an operation."""
    operation = SCHEMA[path][method]
    return st.one_of([operation.as_strategy(generation_mode=mode) for mode in MODES])


CASES = {operation: cases(*operation) for operation in OPERATIONS}


async def send(rig: Rig, case: schemathesis.Case[Any]) -> httpx.Response:
    """Return the answer to a case."""
    made = case.as_transport_kwargs(base_url=rig.gateway.http_url)
    made.pop("timeout", None)
    prepared = requests.Request(**made).prepare()
    return await rig.http.request(
        prepared.method or "",
        prepared.url or "",
        headers=dict(prepared.headers),
        content=prepared.body,
    )


def check_error(answer: httpx.Response, path: str) -> None:
    """Check that the body is an error in the form of the path's API.

    In OpenAI's form, an error of one field must name the field.
    """
    error = answer.json()["error"]
    if path.startswith("/v1/messages"):
        # Only a request with a thread gets details (`gateway/api_errors.py`).
        assert set(error) in ({"type", "message"}, {"type", "message", "details"})
        assert error.get("details") in (None, NO_THREADS)
        return
    assert set(error) == {"message", "type", "param", "code"}
    reason = Reason[error["code"].upper()]
    assert (answer.status_code, error["type"]) == (reason.kind.http, reason.kind.openai_type)
    assert error["message"]
    assert error["param"] or reason in WITHOUT_FIELD, error


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
@fuzzing(40)
@given(data=st.data())
async def test_each_answer_is_documented_and_the_gateway_goes_on(
    rig: Rig, operation: tuple[str, str], data: st.DataObject
) -> None:
    rig.script.answer = echo_within_limit
    answer = await send(rig, data.draw(CASES[operation]))
    documented = DOCUMENT["paths"][operation[1]][operation[0].lower()]["responses"]
    assert str(answer.status_code) in documented
    assert answer.status_code < 500
    if answer.status_code != 200:
        check_error(answer, operation[1])
    good = await rig.http.post("/v1/completions", json={"prompt": "if x", "temperature": 0})
    assert good.json()["choices"][0]["text"] == "if x"
    await until(lambda: rig.script.running == 0)
