"""`outrider profile`: measures forwards, drafting and serving before any experiment."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.config import Settings, parse
from outrider.process.usage import refuse
from outrider_bench.experiment import machine
from outrider_bench.experiment.profile_record import Conditions, Profile, described
from outrider_bench.experiment.serving import ProfiledHead
from outrider_bench.simulator.costs import way_of

_PROGRAM = "outrider profile"
_MOST_SEQUENCES = 32
_HOW = {
    "costs.forwards": "the fastest of up to 100 forwards behind 128 tokens, in a process alone; "
    "at most that of more tokens",
    "costs.prompts": "forwards of prompts of 32 and 256 tokens, the fastest of up to 100",
    "costs.host": "the engine's own time for steps whose forward takes none, the fastest of 60",
    "costs.drafting": "forwards of the draft model by threads, the median lookup of n-grams, and "
    "the fastest rounds of the head",
    "served": "a fixed closed load through the gateway, three rounds after one that warms up",
    "acceptance": "share of the tokens of the load's greedy texts that a drafter guesses right",
    "serving": "the difference of the load and its simulation on costs; no experiment enters it",
}


class ProfileSettings(Settings):
    """Measure forwards, drafting and serving on this machine.

    This takes about five minutes for the bundled pair. `outrider profile head-round` measures a
    head's round at the sizes of any target instead.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_PROFILE_")

    out: Path = Path("profile.json")
    """File to write."""

    target: str = "models/target"
    """Directory of the target."""

    draft: str = "models/draft"
    """Directory of the draft model."""

    head: str = ""
    """Directory of a head of the target to measure as well; unset measures none."""

    grown: bool = False
    """Profile the target grown to 154 M parameters, as in experiments."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Type of both models' weights."""

    threads: int | None = Field(None, ge=1)
    """Threads of the target; unset leaves a core to drafters."""

    draft_threads: list[int] = Field([1])
    """Numbers of threads of the draft model to measure."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if min(self.draft_threads, default=0) < 1:
            raise ValueError("draft_threads must be numbers of at least 1")
        return self


def main(arguments: list[str]) -> int:
    """The exit status. `head-round` as the first word measures a head's round of any size."""
    if arguments[:1] == ["head-round"]:
        from outrider_bench import head_round

        return head_round.main(arguments[1:])
    settings = parse(ProfileSettings, _PROGRAM, arguments)
    try:
        profile = measure(settings)
    except ValueError as error:
        refuse(_PROGRAM, str(error))
    profile.save(settings.out)
    print(f"written: {settings.out}")
    return 0


def measure(settings: ProfileSettings) -> Profile:
    """Measure everything in turn; prints the progress."""
    from outrider_bench.experiment import acceptance, calibration, serving
    from outrider_bench.simulator import measured_costs
    from outrider_bench.simulator.head_costs import head_cost

    cores = sorted(os.sched_getaffinity(0))
    threads = settings.threads or max(1, len(cores) - 1)
    if threads > len(cores):
        raise ValueError(f"threads must be at most the {len(cores)} cores, not {threads}")
    target = _target(settings)
    head = _head(settings, target)
    draft = Path(settings.draft)
    here = machine.this_machine()
    for warning in machine.warnings():
        print(f"{_PROGRAM}: {warning}", file=sys.stderr)
    load, spread = os.getloadavg()[0], machine.spread()
    print("forwards, prompts and drafting", flush=True)
    costs = measured_costs.measure(
        target, draft, threads, settings.dtype, settings.draft_threads, _MOST_SEQUENCES
    )
    print("serving a fixed load", flush=True)
    if head is not None:
        path, counts = Path(head.path), measured_costs.sequences_up_to(_MOST_SEQUENCES)
        drafting = {
            way_of("head", count): head_cost(path, target, count, counts)
            for count in settings.draft_threads
        }
        costs = costs.model_copy(update={"drafting": costs.drafting | drafting})
    served = calibration.calibrate(
        target, draft, settings.dtype, threads, Path(head.path) if head is not None else None
    )
    print("fitting the costs of serving", flush=True)
    fitted = serving.fit(served, costs, target, draft, settings.dtype, head)
    print("comparing guesses with the target's texts", flush=True)
    small_head = Path(settings.head) if settings.head else None
    guessed = acceptance.acceptances(Path(settings.target), draft, settings.dtype, small_head)
    return Profile(
        machine=described(here),
        fingerprint=here.fingerprint,
        commit=machine.commit(Path(__file__).parents[2]),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=settings.target + (" grown" if settings.grown else ""),
        draft=settings.draft,
        head=head.model_copy(update={"path": settings.head}) if head is not None else None,
        dtype=settings.dtype,
        threads=threads,
        how=_HOW,
        costs=costs,
        conditions=Conditions(
            load_averages=(load, os.getloadavg()[0]), spread=max(spread, machine.spread())
        ),
        served=served,
        serving=fitted,
        acceptance=guessed,
    )


def _target(settings: ProfileSettings) -> Path:
    path = Path(settings.target)
    if not path.is_dir():
        raise ValueError(f"target must be a directory of a model, which {path} is not")
    if not settings.grown:
        return path
    from outrider.launch.grow import MODEST
    from outrider_bench.grown import grown_checkpoint

    if settings.dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"dtype must be float32 or bfloat16 for a grown target, not {settings.dtype}"
        )
    return grown_checkpoint(path, Path("bench/out"), MODEST, settings.dtype)


def _head(settings: ProfileSettings, target: Path) -> ProfiledHead | None:
    """The head of the settings for the target in the folder `target`."""
    if not settings.head:
        return None
    from transformers import AutoConfig

    from outrider.heads.reading import read
    from outrider_bench.grown import grown_head

    path = Path(settings.head)
    if settings.grown:
        path = grown_head(path, Path(settings.target), target)
    spec = read(path, AutoConfig.from_pretrained(target)).spec
    states = len(spec.boundaries) + spec.final_state
    return ProfiledHead(path=str(path), hidden_size=spec.target.hidden_size, states=states)
