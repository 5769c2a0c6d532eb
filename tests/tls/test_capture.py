"""What a wire between the processes carries: with TLS, nothing of a prompt can be read."""

from __future__ import annotations

import httpx
import pytest
from chaos_proxy import chaos_proxy
from gateway_rig import TARGET, echo
from scripted_verifier import Script, ScriptedVerifier, ready, serve_verifier
from sites import Site, until

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.prompts import Prompts
from gateway.server import running
from outrider.process import rpc
from outrider.v1 import verifier_pb2

PROMPT = "The recipe is secret: three spoons of saffron, and never tell anyone."


@pytest.mark.parametrize("encrypted", [False, True])
async def test_only_without_tls_does_the_wire_show_the_prompt(site: Site, encrypted: bool) -> None:
    """Clients send text, and gateways send token ids. Without TLS, both are on the wire."""
    prompts = Prompts(TARGET)
    script = Script(ready(prompts.fingerprint), echo)
    server = rpc.Server("outrider.v1.VerifierService")
    serve_verifier(ScriptedVerifier(script), server.grpc)
    tls = site.issue("verifier") if encrypted else None
    [port] = await server.start("127.0.0.1:0", tls=tls)
    mine = site.issue("gateway")
    files = {"tls_cert": mine.cert, "tls_key": mine.key, "tls_ca": mine.ca}
    files |= {"public_tls_cert": mine.cert, "public_tls_key": mine.key}
    async with chaos_proxy(port) as inner:
        settings = GatewaySettings(
            verifier=[f"127.0.0.1:{inner.port}"],
            tokenizer=TARGET,
            http_port=0,
            grpc_listen="127.0.0.1:0",
            drain_seconds=0,
            **(files if encrypted else {}),
        )
        async with (
            running(settings, Metrics()) as made,
            chaos_proxy(int(made.http_url.rpartition(":")[2])) as outer,
            httpx.AsyncClient(verify=site.context(None)) as client,
        ):
            await until(lambda: made.router.ready)
            url = f"{made.http_url.partition(':')[0]}://127.0.0.1:{outer.port}/v1/completions"
            response = await client.post(url, json={"prompt": PROMPT, "max_tokens": 64})
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"].startswith(PROMPT)
    await server.stop(0)
    ids = prompts.tokenizer.encode(PROMPT).ids
    packed = verifier_pb2.GenerateTokensRequest(prompt_token_ids=ids).SerializeToString()
    assert (PROMPT.encode() in outer.carried) is not encrypted
    assert (packed in inner.carried) is not encrypted
    assert len(inner.carried) > len(packed)
