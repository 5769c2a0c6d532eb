"""A gateway on real sockets in front of a scripted verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields

import pytest
import pytest_asyncio

from gateway.text.prompts import Prompts
from gateway.upstream import routing
from tests.gateway.gateway_rig import TARGET, Rig, echo, is_ready, own_rig, rig_with_template
from tests.gateway.mortal_verifiers import Site, running_site
from tests.gateway.scripted_verifier import Script, ready
from tests.waiting import until

# The template of a model that thinks, and calls tools in Hermes' format. It leaves out the content
# of a message if the content has the word "hidden".
_THINKERS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if 'hidden' not in m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id }}<|end|>{% endfor %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts(TARGET)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_rig(prompts: Prompts) -> AsyncIterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        # With the default pause, tests would wait up to a second until the gateway sees a change.
        patch.setattr(routing, "_POLL_READY_S", 0.05)
        async with own_rig(prompts) as rig:
            yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def rig(shared_rig: Rig) -> Rig:
    """Return the shared gateway, ready, with a verifier that is reset and echoes prompts."""
    script = shared_rig.script
    fresh = Script(ready(shared_rig.prompts.fingerprint), echo)
    await until(lambda: script.running == 0)
    for field in fields(Script):
        setattr(script, field.name, getattr(fresh, field.name))
    # Poll now: this gateway's pause may have begun while another test had set a longer one.
    shared_rig.gateway.router.replicas[0].poll_now.set()
    await until(lambda: is_ready(shared_rig.http))
    await until(lambda: shared_rig.gateway.router.replicas[0].info == script.info)
    return shared_rig


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _shared_thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig_with_template(tmp_path_factory.mktemp("thinker"), _THINKERS_TEMPLATE) as rig:
        yield rig


@pytest.fixture
def thinker(_shared_thinker: Rig) -> Rig:
    """Return a gateway whose model thinks and calls tools.

    Its verifier has got no requests yet.
    """
    _shared_thinker.script.requests.clear()
    _shared_thinker.script.answer = echo
    return _shared_thinker


@pytest_asyncio.fixture(loop_scope="session")
async def site(prompts: Prompts) -> AsyncIterator[Site]:
    """Yield a gateway that polls its two verifiers often.

    Both verifiers serve the model under one name.
    """
    async with running_site(prompts) as made:
        yield made
