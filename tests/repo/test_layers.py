"""Who may import whom, and what each process starts without."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("verifier_svc", "drafter_svc", "gateway")


def sources(package: str) -> Iterator[Path]:
    return (path for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.parts)


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_no_other_service(service: str) -> None:
    others = set(SERVICES) - {service} | {"bench"}
    for path in sources(service):
        assert not roots(path) & others, path


def test_outrider_imports_no_service_but_for_the_settings_of_serve() -> None:
    """But for what `outrider serve` starts: it checks a drafter's settings against their schema before anything runs."""
    for path in sources("outrider"):
        services = {name for name in imported(path) if name.partition(".")[0] in SERVICES}
        settings = ("drafter_svc.config.", "drafter_svc.families.registry.")
        allowed = (
            {name for name in services if name.startswith(settings)}
            if path.name == "stack.py"
            else set()
        )
        assert services == allowed, path


def test_only_wire_servicers_and_streams_import_protobuf() -> None:
    streams = {"stream.py", "draft_streams.py", "token_stream.py", "token_streams.py"}
    allowed = streams | {"servicer.py", "connect.py", "routing.py", "__main__.py", "server.py"}
    for package in ("outrider", *SERVICES):
        for path in sources(package):
            # The conformance kit is about the messages themselves.
            if path.parent.name not in ("conformance", "wire") and any(
                name.startswith("outrider.v1") for name in imported(path)
            ):
                assert path.name in allowed, path


def test_only_servers_and_streams_of_the_verifier_import_grpc() -> None:
    speaks = {"server.py", "servicer.py", "draft_streams.py", "token_streams.py"}
    for path in sources("verifier_svc"):
        known = any(
            name.startswith(
                ("grpc", "google", "outrider.process.rpc", "outrider.v1", "outrider.wire")
            )
            for name in imported(path)
        )
        assert known == (path.name in speaks), path


def test_drafter_families_and_sampling_do_not_import_grpc() -> None:
    for path in (
        *sources("drafter_svc/families"),
        *sources("drafter_svc/pools"),
        *sources("outrider/sampling"),
    ):
        assert "grpc" not in roots(path), path


def test_state_policy_and_drafts_of_the_verifier_do_not_import_torch() -> None:
    for room in ("state", "policy", "drafts"):
        for path in sources(f"verifier_svc/{room}"):
            assert "torch" not in roots(path), path


LAYERS = ("state", "policy", "verification", "drafts", "engine", "streams")


@pytest.mark.parametrize("room", LAYERS)
def test_no_layer_of_the_verifier_imports_a_higher_one(room: str) -> None:
    higher = tuple(f"verifier_svc.{name}." for name in LAYERS[LAYERS.index(room) + 1 :])
    for path in sources(f"verifier_svc/{room}"):
        assert not [name for name in imported(path) if name.startswith(higher)], path


def test_the_verifier_reads_time_only_from_its_clock() -> None:
    for path in sources("verifier_svc"):
        assert "time" not in roots(path), path


@pytest.mark.parametrize(
    "module",
    [
        "gateway.server",
        "gateway.openai",
        "drafter_svc.__main__",
        "verifier_svc.__main__",
        "drafter_svc.families.ngram",
        "drafter_svc.families.model",
        "outrider.launch.cli",
    ],
)
def test_modules_that_run_no_model_load_without_torch(module: str) -> None:
    program = (
        f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["verifier_svc --target x", "drafter_svc --family model --model x"]
)
def test_a_process_without_torch_names_the_missing_extra(command: str) -> None:
    """As after `pip install outrider` alone: None in sys.modules is how Python marks a module that cannot be found."""
    module, *arguments = command.split()
    without = f"import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = {arguments}"
    program = f"{without}; runpy.run_module({module!r}, run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "needs torch; in Outrider's sources" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_module_unpickles_or_evaluates_data() -> None:
    for package in ("outrider", *SERVICES):
        for path in sources(package):
            assert not roots(path) & {"pickle", "marshal", "shelve", "dill"}, path
            called = {
                ast.unparse(node.func)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call)
            }
            assert not called & {"eval", "exec", "torch.load"}, path
