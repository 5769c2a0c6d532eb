"""A verifier's acceptance settings show which verifiers may not continue its answers."""

from __future__ import annotations

from typing import Any

import pytest

from verifier_svc.config import VerifierSettings


def acceptance_settings(**changed: Any) -> dict[str, str]:
    return VerifierSettings(target="models/target", **changed).acceptance_settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampled_drafts", True),
        ("sampled_rule", "token-wise"),
        ("synthetic_acceptance_rates", [0.5, 0.25]),
    ],
)
def test_a_setting_that_changes_how_tokens_are_chosen_is_among_them(name: str, value: Any) -> None:
    before = acceptance_settings()
    after = acceptance_settings(**{name: value})
    flag = name.replace("_", "-")
    assert {key for key in before if before[key] != after[key]} == {flag}
    assert after[flag] == str(value).lower()


def test_settings_of_speed_alone_are_not_among_them() -> None:
    faster = {"draft_tokens": "fixed:4", "max_sequences": 8, "always_draft": True, "threads": 1}
    assert acceptance_settings(**faster) == acceptance_settings()
