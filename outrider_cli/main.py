"""The `outrider` command. Each command imports what it needs, so that `--help` answers at once.

This module itself loads nothing of the services but the names of the drafters' families.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import click

from drafter_svc.families.registry import BUILT_IN
from outrider.process.settings.usage import invoke, refuse

# Commands of another package, keyed by their names in the entry-point group (pyproject.toml). The
# help texts of these commands are here, so that `outrider lab --help` does not load the package.
_LAB = {
    "profile": "Measure what forwards, drafting and links cost on this machine.",
    "run": "Measure what an experiment file describes.",
    "report": "Make tables, a plot and a CSV of a run's measurements.",
    "predict": "Predict which place of a drafter is fastest: an experiment file in the simulator.",
    "simulate": "Run engine, planner and drafters in virtual time, as a scenario file says.",
    "bench": "Measure the engine's own time for a step, and tokens/s of each drafter.",
    "table": "Compare all decoding modes on a published model, by kind of prompt.",
    "chaos": "Play faults against a real stack under traffic, and check every request.",
}
_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENTRY_POINTS = "outrider.commands"
_EXTRA = "bench"
_PASS_ON = {"ignore_unknown_options": True}
_ARGUMENTS = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


class _Later(click.Command):
    """A command that is made from its settings when it is called, so that other commands do not
    load these settings."""

    def __init__(self, name: str, text: str, load: Callable[[], click.Command]) -> None:
        super().__init__(name, help=text)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **named: Any) -> Any:
        """Return the context of the loaded command, which click then runs or completes."""
        return self._load().make_context(info_name, args, *rest, **named)


def _print_version(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        from outrider_cli.version import described

        print(described())
        context.exit()


@click.group()
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version, its commit, the compiled parts and the installed extras.",
)
def app() -> None:
    """Disaggregated speculative decoding.

    bash completes commands and flags after
    `eval "$(_OUTRIDER_COMPLETE=bash_source outrider)"`, zsh after the same with zsh_source, and
    fish after `_OUTRIDER_COMPLETE=fish_source outrider | source`.
    """


def _serve() -> click.Command:
    from outrider.process.settings.config import command
    from outrider_cli.serve_settings import ServeSettings

    def run(settings: ServeSettings) -> int:
        from outrider_cli import serve

        return serve.run(settings)

    return command(ServeSettings, "serve", run)


def _gateway() -> click.Command:
    from gateway.__main__ import run
    from gateway.config import GatewaySettings
    from outrider.process.settings.config import command

    return command(GatewaySettings, "gateway", run)


def _verifier() -> click.Command:
    from outrider.process.settings.config import command
    from outrider_cli.verifier import VerifierWithDraftersSettings, run

    return command(VerifierWithDraftersSettings, "verifier", run)


app.add_command(
    _Later("serve", "Run a verifier, drafters and a gateway on this host until Ctrl-C.", _serve)
)
app.add_command(_Later("gateway", "Serve the OpenAI API and gRPC in front of verifiers.", _gateway))
app.add_command(_Later("verifier", "Hold the target, and accept right draft tokens.", _verifier))


@app.command(
    add_help_option=False,
    context_settings=_PASS_ON,
    help=f"Draft for verifiers, with a family: {', '.join(BUILT_IN)} or another family.",
)
@_ARGUMENTS
def drafter(arguments: tuple[str, ...]) -> None:
    """Run a drafter until SIGTERM or SIGINT."""
    # One of the arguments is the family, which decides what other settings there are.
    from drafter_svc.__main__ import main

    main(list(arguments), "outrider drafter")


@app.command()
def demo() -> int:
    """Compare plain decoding with each drafter on the bundled pair, in the folder of the sources.

    Exits with 0 only if all texts are identical.
    """
    from outrider_cli.demo import run

    return run()


@app.group()
def lab() -> None:
    """Measure, predict and simulate. docs/placement.md and docs/benchmarks.md describe how."""


def _add_to_lab(name: str, text: str) -> None:
    """Add a command of another package, which parses its own arguments."""

    @lab.command(name, help=text, add_help_option=False, context_settings=_PASS_ON)
    @_ARGUMENTS
    def run(arguments: tuple[str, ...]) -> int:
        return _run_in_lab(name, arguments)


def _tls_option(name: str, text: str) -> Callable[[_Command], _Command]:
    """Return a command-line option for the path of a file that mutual TLS needs.

    Without the flag, the gateway's, the verifier's or the drafter's environment variable counts.
    """
    processes = ("GATEWAY", "VERIFIER", "DRAFTER")
    variables = [f"OUTRIDER_{process}_TLS_{name.upper()}" for process in processes]
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option(f"--tls-{name}", type=path, envvar=variables, help=f"PEM file with {text}.")


def _run_in_lab(name: str, arguments: tuple[str, ...]) -> int:
    """Run a command of the entry-point group; exit with status 2 if its extra is not installed."""
    found = entry_points(group=_ENTRY_POINTS, name=name)
    try:
        if not found:
            raise ModuleNotFoundError("the command is not installed")
        status: int = next(iter(found)).load()(list(arguments))
    except ModuleNotFoundError as error:
        refuse(f"outrider lab {name}", f"{error}; in Outrider's sources, pip install '.[{_EXTRA}]'")
    return status


for _name, _text in _LAB.items():
    _add_to_lab(_name, _text)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "command",
    metavar="COMMAND...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
)
@click.option(
    "--tokenizer",
    help="Directory or hub id of the tokenizer that the drafter must have. Without it, any"
    " tokenizer passes.",
)
@click.option(
    "--transcript",
    type=click.Path(path_type=Path),
    help="File to write the messages of both sides to, one line of JSON for each message.",
)
@click.option(
    "--hidden-size",
    type=click.IntRange(min=1),
    help="Hidden size of the target that a drafter's head was made for; 16 by default.",
)
@click.option(
    "--certs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that `outrider certs` made. The drafter then meets a verifier with mutual TLS.",
)
def conformance(
    command: tuple[str, ...],
    tokenizer: str | None,
    transcript: Path | None,
    hidden_size: int | None,
    certs: Path | None,
) -> int:
    """Check that a drafter keeps the draft stream's contract.

    COMMAND follows "--" and starts a drafter; {address} in it stands for the verifier's host:port.
    Exits with 0 if every rule was kept.
    """
    from outrider.errors import OutriderError

    try:
        return _conformance(command, tokenizer, transcript, hidden_size, certs)
    except OutriderError as error:
        raise click.UsageError(error.message) from error


def _conformance(
    command: tuple[str, ...],
    tokenizer: str | None,
    transcript: Path | None,
    hidden_size: int | None,
    certs: Path | None,
) -> int:
    from outrider.conformance.kit import HIDDEN_SIZE, check_drafter
    from outrider.tokenizer import fingerprint, load_tokenizer

    if not any("{address}" in part for part in command):
        raise click.UsageError(
            "COMMAND must hold {address}, which stands for the verifier's host:port"
        )
    size = hidden_size or HIDDEN_SIZE
    if tokenizer is None:
        return check_drafter(command, hidden_size=size, transcript=transcript, certs=certs)
    loaded = load_tokenizer(tokenizer)
    return check_drafter(
        command,
        fingerprint=fingerprint(loaded),
        vocab_size=loaded.get_vocab_size(),
        hidden_size=size,
        transcript=transcript,
        certs=certs,
    )


@app.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host",
    multiple=True,
    help="Names and addresses by which the processes are reached, with commas between them;"
    " localhost, 127.0.0.1 and ::1 are always among them.",
)
@click.option(
    "--role",
    multiple=True,
    help="Role to make a certificate for; by default all roles. Repeat the option for several.",
)
@click.option(
    "--name",
    help="Common name of the certificate and name of its files, if there is one role; by default"
    " the role's name. A drafter's id must be its certificate's common name, or begin with that"
    " name and a slash.",
)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=365, help="Days until the certificates expire."
)
def certs(
    directory: Path,
    host: tuple[str, ...],
    role: tuple[str, ...],
    name: str | None,
    days: int,
) -> int:
    """Make a private authority in DIR, and a certificate for each role.

    If DIR has an authority, that authority signs, so the same command renews the certificates. If
    DIR lacks ca.pem and ca.key, the command makes a new authority; certificates that an earlier
    authority signed stop working.
    """
    from outrider.errors import OutriderError
    from outrider.process.security.certs import NAMES, run

    if unknown := [kind for kind in role if kind not in NAMES]:
        raise click.UsageError(f"role: must be one of {', '.join(NAMES)}, not {unknown[0]!r}")
    try:
        return run(directory, host, role, name, days)
    except OutriderError as error:
        raise click.UsageError(error.message) from error


@app.command("convert-head")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path, file_okay=False))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path, file_okay=False))
def convert_head(source: Path, target: Path) -> int:
    """Copy the draft head in folder IN to a new folder OUT, with its pickles as safetensors.

    Published heads often come as pytorch_model.bin, medusa_lm_head.pt or mask_embedding.pt. Torch's
    weights-only reader reads these pickles, in a process with bounded memory and time.
    """
    from outrider.errors import OutriderError
    from outrider.heads.convert import run

    try:
        return run(source, target)
    except OutriderError as error:
        raise click.UsageError(error.message) from error


@app.command("check-head")
@click.argument("head", metavar="HEAD", type=click.Path(path_type=Path, file_okay=False))
@click.argument("target", metavar="TARGET")
@click.option("--dtype", default="auto", help="Type of the target's computation.")
@click.option("--device", default="auto", help="auto (CUDA when there is any), cpu or cuda:N.")
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own code.")
def check_head(head: Path, target: str, dtype: str, device: str, trust_remote_code: bool) -> int:
    """Say what the draft head in folder HEAD is, and how often it is right about TARGET.

    Loads the target, a directory or hub id. If the head's file can be read in several ways, says
    which reading fits. Ends with status 1 if the head was made for another target.
    """
    from outrider.errors import OutriderError
    from outrider_cli.check_head import run

    try:
        return run(head, target, dtype, device, trust_remote_code=trust_remote_code)
    except OutriderError as error:
        raise click.UsageError(error.message) from error


@app.command()
@click.argument("address")
@click.option(
    "--service",
    default="",
    help="Full name of the gRPC service to ask about; by default the whole process.",
)
@_tls_option("cert", "the caller's certificate, of any role")
@_tls_option("key", "its key")
@_tls_option("ca", "the authorities that sign the process's certificate; with it, TLS is used")
@click.option(
    "--role",
    type=click.Choice(["verifier", "drafter"]),
    help="With TLS: the role that the process's certificate must have. By default the certificate"
    " must have the name or address that is dialled, which a drafter's certificate lacks.",
)
def health(
    address: str,
    service: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    role: str | None,
) -> int:
    """Ask the process at ADDRESS (host:port or unix:/path) for its gRPC health.

    Exits with 0 if it serves, else with 1 and says why.
    """
    from outrider.process.security.roles import Role
    from outrider_cli.health import problem

    server = None if role is None else Role(role)
    why = problem(address, service, tls_cert, tls_key, tls_ca, server)
    if why is not None:
        print(f"outrider health: {address}: {why}", file=sys.stderr)
    return int(why is not None)


@app.group()
def keys() -> None:
    """Add, list and revoke the API keys of a gateway's --keys-file."""


_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@keys.command("add")
@_FILE
@click.option("--tenant", required=True, help="Requests of one tenant share caches and n-grams.")
@click.option("--id", help="Name of the key; by default the tenant's name and a number.")
@click.option(
    "--role",
    type=click.Choice(["tenant", "operator"]),
    default="tenant",
    help="An operator also sees metrics, processes, and sums over all tenants.",
)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Days until it expires.")
@click.option(
    "--concurrent-sequences",
    type=click.IntRange(min=1),
    help="The most sequences (prompts times n) that may run at once at a gateway; by default any"
    " number.",
)
def keys_add(file: Path, days: float | None, **fields: Any) -> int:
    """Add a key to FILE, which is made if it is missing, and print the key.

    FILE holds only the key's hash, so the key cannot be shown again.
    """
    from outrider_cli.keys import add

    return add(file, fields, days)


@keys.command("list")
@_FILE
def keys_list(file: Path) -> int:
    """Show the keys of FILE: tenants, roles, expiries and limits of sequences at once."""
    from outrider_cli.keys import show

    return show(file)


@keys.command("revoke")
@_FILE
@click.argument("id")
def keys_revoke(file: Path, id: str) -> int:
    """Remove the key ID from FILE. Gateways refuse the key within two seconds."""
    from outrider_cli.keys import revoke

    return revoke(file, id)


@app.command()
def version() -> None:
    """Print the version, its commit, the compiled parts and the installed extras."""
    from outrider_cli.version import described

    print(described())


def main() -> None:
    """Entry point of the `outrider` command."""
    raise SystemExit(invoke(app, "outrider", sys.argv[1:] or ["--help"]))


if __name__ == "__main__":
    main()
