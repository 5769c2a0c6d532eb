"""A profile with round figures, for tests."""

from typing import Any

from outrider_bench.experiment.profile_record import Profile

COSTS = {
    "source": "made up for a test",
    "measured": False,
    "forwards": [
        {"sequences": 1, "tokens": 1, "seconds": 0.004},
        {"sequences": 1, "tokens": 9, "seconds": 0.005},
        {"sequences": 8, "tokens": 1, "seconds": 0.006},
        {"sequences": 8, "tokens": 9, "seconds": 0.012},
    ],
    "prompt_step_s": 0.0,
    "prompt_token_s": 0.00002,
    "host_step_s": 0.0,
    "host_sequence_s": 0.0,
    "drafting": {
        "ngram": {
            "round_s": 0.0,
            "token_s": {1: 0.0},
            "sequence_s": 0.00001,
            "branches_s": 0.00003,
        },
        "model": {"round_s": 0.0, "token_s": {1: 0.0003, 8: 0.0004}, "prompt_token_s": 0.00001},
    },
}


def _serving(way: str, batch: int, **more: float) -> dict[str, Any]:
    common = {
        "way": way,
        "batch": batch,
        "sequences": batch,
        "slowdown": 1.0 + 0.1 * (batch == 8),
        "client_s": 0.001,
    }
    return {**common, "before_s": 0.00005 * batch, "after_s": 0.0001 * batch, **more}


def made_up_profile(**more: Any) -> Profile:
    """Return a profile of the bundled pair on two cores, one of them the target's."""
    drafted = {"round_trip_s": 0.0005}
    given = {
        "machine": {"host": "made-up", "cores": [0, 1]},
        "fingerprint": "00000000",
        "commit": "none",
        "measured_at": "2026-01-01T00:00:00Z",
        "target": "models/target",
        "draft": "models/draft",
        "dtype": "float32",
        "threads": 1,
        "how": {},
        "costs": COSTS,
        "serving": [
            *(_serving("plain", batch) for batch in (1, 8)),
            *(_serving("ngram", batch, **drafted) for batch in (1, 8)),
            *(_serving("model", batch, slowdown=1.3, **drafted) for batch in (1, 8)),
        ],
        **more,
    }
    return Profile.model_validate(given)
