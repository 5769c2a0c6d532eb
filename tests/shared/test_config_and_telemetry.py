"""Settings refuse unknown names; spans cross processes, and are no-ops when tracing is off."""

from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from drafter_svc.config import EraseSettings, settings_schema
from gateway.config import GatewaySettings
from outrider.errors import OutriderError
from outrider.process.observability import telemetry
from outrider.process.settings.config import Settings, parse
from outrider_cli import stack_plan
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.stack_plan import plan_stack
from verifier_svc.config import VerifierSettings


def test_flags_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("target: from-file\ndraft_tokens: 1\nhttp_port: 1\n")
    monkeypatch.setenv("OUTRIDER_DRAFT_TOKENS", "2")
    monkeypatch.setenv("OUTRIDER_HTTP_PORT", "2")
    settings = parse(ServeSettings, "serve", ["--config", str(file), "--http-port", "3"])
    assert (settings.target, settings.draft_tokens, settings.http_port) == ("from-file", "2", 3)
    monkeypatch.setenv("OUTRIDER_CONFIG", str(file))
    assert parse(ServeSettings, "serve", []).target == "from-file"


@pytest.mark.parametrize(
    ("text", "drafters"), [("ngram", ["ngram"]), ('["ngram", "suffix"]', ["ngram", "suffix"])]
)
def test_a_list_in_the_environment_is_one_value_or_json(
    monkeypatch: pytest.MonkeyPatch, text: str, drafters: list[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER", text)
    assert parse(ServeSettings, "serve", ["--target", "x"]).drafter == drafters


@pytest.mark.parametrize(
    ("arguments", "drafters"),
    [
        ("smollm2", ["ngram", "grammar"]),
        ("smollm2 --drafter suffix", ["suffix"]),
        ("./smollm2", []),
    ],
)
def test_smollm2_has_drafters_unless_others_are_named(arguments: str, drafters: list[str]) -> None:
    assert parse(ServeSettings, "serve", arguments.split()).drafter == drafters


SCHEMAS: list[tuple[type[Settings], list[str]]] = [
    (ServeSettings, ["--target", "x"]),
    (GatewaySettings, ["--tokenizer", "x", "--verifier", "127.0.0.1:1"]),
    (VerifierSettings, ["--target", "x"]),
    (settings_schema("ngram"), ["--family", "ngram"]),
    (settings_schema("model"), ["--family", "model", "--model", "x"]),
    (EraseSettings, ["--redis", "redis://r", "--tenant", "t"]),
]


@pytest.mark.parametrize(("schema", "given"), SCHEMAS, ids=lambda value: str(value)[:60])
def test_an_empty_variable_counts_as_not_set(
    schema: type[Settings], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compose, .env files and Helm set an empty variable for a setting without a value."""
    usual = parse(schema, "any", given)
    for name in schema.model_fields:
        monkeypatch.setenv(f"{schema.model_config['env_prefix']}{name.upper()}", "")
    assert parse(schema, "any", given).model_dump() == usual.model_dump()


def test_erase_ignores_drafter_settings_in_the_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drafter.yaml").write_text("family: ngram\nredis: redis://r\n")
    monkeypatch.setenv("OUTRIDER_DRAFTER_CONFIG", str(tmp_path / "drafter.yaml"))
    settings = parse(EraseSettings, "erase", ["--tenant", "t"])
    assert (settings.redis, settings.tenant) == ("redis://r", "t")
    assert parse(settings_schema("ngram"), "drafter", []).family == "ngram"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_prot: 1\n", "serve: there is no setting http_prot (did you mean http_port?)\n"),
        ("draft_tokens: many\n", "draft-tokens: must be goodput, goodput:MAX, auto or fixed:K"),
        ("draft_tokens: 65\n", "with at most 64, not '65'"),
    ],
)
def test_unknown_or_wrong_settings_of_a_file_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"target: x\n{text}")
    with pytest.raises(SystemExit) as caught:
        parse(ServeSettings, "serve", ["--config", str(file)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("", "eagle", "model", "ngram=x", "ngram,key", "model=x,=3", "model=x,place=there"),
        *("ngram,place=in-process", "model=x,place=in-process,cores=1", "model=x,device=gpu"),
        *("model=x,place=in-process,page-count=few", "model=x,device=cpu,place=in-process"),
    ],
)
def test_an_invalid_drafter_is_refused(text: str) -> None:
    with pytest.raises(OutriderError) as caught:
        DrafterSpec.parse(text)
    assert caught.value.field == "drafter"


def planned(directory: Path, *arguments: str) -> dict[str, dict[str, str]]:
    """Return the flags of each process's command with their values."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--verifier-port", "0"]
    settings = parse(ServeSettings, "serve", ["--target", "t", *ports, *arguments])
    children = plan_stack(settings, directory).children
    return {child.name: dict(pairwise([*child.arguments, ""])) for child in children}


def test_the_verifier_leaves_draft_models_their_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    drafters = ["model=m", "model=m,cores=0-3,8", "ngram"]
    children = planned(tmp_path, *(word for drafter in drafters for word in ("--drafter", drafter)))
    assert children["model-1"]["--threads"] == "1"
    assert "--threads" not in children["model-2"]
    assert children["verifier"]["--threads"] == "10"


@pytest.mark.parametrize(
    ("drafter", "gpu", "device", "in_process"),
    [
        ("head=h", False, "auto", "head=h,id=head-1"),
        ("head=h,head-states=1,3", True, "auto", "head=h,head_states=1,3,id=head-1"),
        ("head=h,place=process", True, "auto", None),
        ("head=h,cores=0", False, "auto", None),
        ("model=m", False, "auto", None),
        ("model=m", True, "auto", "model=m,id=model-1"),
        ("model=m", True, "cpu", None),
        ("model=m,place=in-process", False, "cpu", "model=m,id=model-1"),
        ("model=m,place=process", True, "auto", None),
        ("model=m,cores=0", True, "auto", None),
        ("model=m,device=cpu", True, "auto", None),
        ("model=m,device=cuda:0", True, "cuda", "model=m,id=model-1"),
        ("model=m,device=cuda:1", True, "auto", None),
        ("model=m,id=small", True, "cuda:1", "model=m,id=small"),
        ("ngram", True, "auto", None),
    ],
)
def test_a_drafter_on_the_targets_gpu_and_a_head_run_in_the_verifiers_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    gpu: bool,
    device: str,
    in_process: str | None,
) -> None:
    monkeypatch.setattr(stack_plan, "_has_gpu", lambda: gpu)
    children = planned(tmp_path, "--drafter", drafter, "--device", device)
    assert children["verifier"].get("--in-process") == in_process
    # Besides the verifier and the gateway, there may be a drafter's process.
    assert len(children) == 2 + (in_process is None)


def test_beside_vllm_only_a_head_runs_in_the_verifiers_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_plan, "_has_gpu", lambda: True)
    drafters = ["--drafter", "head=h", "--drafter", "model=m"]
    children = planned(tmp_path, "--engine", "vllm", *drafters)
    assert list(children) == ["verifier", "model-1", "gateway"]
    assert children["verifier"]["--in-process"] == "head=h,id=head-1"


def test_drafters_have_names_of_their_own_wherever_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_plan, "_has_gpu", lambda: True)
    drafters = ["model=m", "model=m,place=process", "ngram"]
    children = planned(tmp_path, *(word for drafter in drafters for word in ("--drafter", drafter)))
    assert list(children) == ["verifier", "model-2", "ngram-1", "gateway"]
    assert children["verifier"]["--in-process"] == "model=m,id=model-1"
    with pytest.raises(OutriderError, match="names two drafters 'model-1'"):
        planned(tmp_path, "--drafter", "model=m", "--drafter", "model=m,id=model-1")


def test_a_drafter_of_grammars_reads_the_target(tmp_path: Path) -> None:
    children = planned(tmp_path, "--drafter", "grammar")
    assert children["grammar-1"]["--target"] == "t"
    assert "--threads" not in children["grammar-1"]


def test_a_gateways_keys_go_to_the_gateway_alone(tmp_path: Path) -> None:
    children = planned(tmp_path, "--host", "127.0.0.1", "--keys-file", "keys.yaml")
    assert children["gateway"]["--keys-file"] == "keys.yaml"
    assert "--keys-file" not in children["verifier"]
    assert "--no-open" in children["gateway"]


def test_a_child_span_joins_its_parents_trace_by_the_header(spans: InMemorySpanExporter) -> None:
    with (
        telemetry.start_root("request", {}) as root,
        telemetry.start("step", root.traceparent, seconds_ago=1.0) as child,
    ):
        child.set(outrider__base_length=3)
    step, request = spans.get_finished_spans()
    assert step.context.trace_id == request.context.trace_id
    assert step.parent is not None
    assert step.parent.span_id == request.context.span_id
    assert step.attributes == {"outrider.base_length": 3}
    assert step.start_time is not None
    assert request.start_time is not None
    assert step.start_time < request.start_time


def test_a_caller_can_decide_not_to_sample(spans: InMemorySpanExporter) -> None:
    unsampled = "00-" + "1" * 32 + "-" + "2" * 16 + "-00"
    assert telemetry.start_root("request", {"traceparent": unsampled}) is telemetry.NO_SPAN
    assert telemetry.start("step", "") is telemetry.NO_SPAN
    assert not spans.get_finished_spans()
