"""Each alert fires on its fault, is silent without it, and links to a section of the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "compose/observability/rules.yaml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
RUNBOOK = (ROOT / "compose/observability/runbook.md").read_text()
# There is a sample each minute, for two hours.
LENGTH = 120

# Maps an alert to series. Each series has its values with the fault, and its values in good health,
# in promtool's notation.
FAULTS: dict[str, list[tuple[str, str, str]]] = {
    "OutriderTargetDown": [('up{job="gateway", instance="a"}', "0", "1")],
    "OutriderGatewayNotReady": [('outrider:ready{job="gateway", instance="a"}', "0", "1")],
    "OutriderVerifierNotReady": [('outrider:ready{job="verifier", instance="a"}', "0", "1")],
    "OutriderDrafterNotRegistered": [('outrider:ready{job="drafter", instance="a"}', "0", "1")],
    "OutriderDegraded": [('outrider:degraded{job="gateway", instance="a"}', "1", "0")],
    "OutriderDrafterLost": [('outrider:drafters_lost{job="gateway", instance="a"}', "2", "0")],
    "OutriderDifferingModels": [('outrider:differing_models{job="gateway"}', "1", "0")],
    "OutriderRestarting": [
        ('process_start_time_seconds{job="verifier", instance="a"}', "0+60", "7")
    ],
    "OutriderErrors": [
        ('outrider:http_responses_total{job="gateway", status="200"}', "0+90", "0+90"),
        ('outrider:http_responses_total{job="gateway", status="503"}', "0+10", "0+1"),
    ],
    "OutriderOverloaded": [
        ('outrider:request_refused_total{job="gateway", instance="a"}', "0+60", "0+1")
    ],
    "OutriderFirstTokenSlow": [
        (f'outrider:time_to_first_token_seconds_bucket{{job="gateway", le="{le}"}}', slow, good)
        for le, slow, good in (("10", "0+1", "0+9"), ("20", "0+9", "0+9"), ("+Inf", "0+9", "0+9"))
    ],
    "OutriderKvCacheFull": [
        ('outrider:kv_cache_usage_perc{job="verifier", instance="a"}', "0.99", "0.9")
    ],
    "OutriderIntegrityFailure": [
        ('outrider:integrity_failures_total{job="verifier"}', "0x90 1", "0"),
    ],
    "OutriderEventLoopLag": [
        (f'outrider:event_loop_lag_seconds_bucket{{job="gateway", le="{le}"}}', late, good)
        for le, late, good in (("0.25", "0+1", "0+9"), ("1", "0+9", "0+9"), ("+Inf", "0+9", "0+9"))
    ],
    "OutriderCertificateExpires": [
        (
            'outrider:certificate_expiry_timestamp_seconds{setting="tls-cert"}',
            str(13 * 86400),
            str(20 * 86400),
        )
    ],
    "OutriderAcceptanceFell": [('outrider:acceptance_fell{drafter="d"}', "1", "0")],
    "OutriderDraftingPaused": [
        ('outrider:drafting_paused{job="verifier", instance="a", drafter="d"}', "1", "0"),
        ('outrider:num_requests_running{job="verifier", instance="a"}', "3", "3"),
    ],
    "OutriderDraftingFails": [
        ('outrider:drafter_failed_sequences_total{drafter="d"}', "0+1", "5"),
    ],
    "OutriderRedisFails": [
        ('outrider:redis_lookups_total{drafter="d", event="sent"}', "0+10", "0+90"),
        ('outrider:redis_lookups_total{drafter="d", event="skipped"}', "0+50", "0+1"),
    ],
    "OutriderFilesRunOut": [
        ('process_open_fds{job="gateway", instance="a"}', "900", "100"),
        ('process_max_fds{job="gateway", instance="a"}', "1000", "1000"),
    ],
}


def repeated(values: str) -> str:
    """Repeat values for each minute; a value that is written with `+` grows each minute."""
    if " " in values:
        return f"{values}x{LENGTH}"
    return f"{values}x{LENGTH}" if "+" in values else f"{values}+0x{LENGTH}"


def case(name: str, series: list[tuple[str, str]], firing: set[str]) -> dict[str, Any]:
    """Return a test for promtool: at the end of the series, only the alerts in `firing` fire."""
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(firing)]
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": each, "values": repeated(values)} for each, values in series],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{LENGTH}m",
                "exp_samples": samples,
            }
        ],
    }


def test_each_alert_fires_on_its_fault_alone_and_none_in_good_health(tmp_path: Path) -> None:
    assert FAULTS.keys() == ALERTS.keys()
    cases = [
        case(alert, [(name, bad) for name, bad, _ in fault], {alert})
        for alert, fault in FAULTS.items()
    ]
    health = {name: good for fault in FAULTS.values() for name, _, good in fault}
    cases.append(case("good health", list(health.items()), set()))
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": cases}))
    binary = shutil.which("promtool")
    assert binary is not None, "no promtool on this machine; `make test` installs Prometheus"
    done = subprocess.run([binary, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_severity_a_summary_and_a_section_of_the_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    written = set(re.findall(r"\b(?:critical|warning|info)\b", rule["labels"]["severity"]))
    by_job = {"critical", "warning"} if alert == "OutriderTargetDown" else None
    assert written == (by_job or {rule["labels"]["severity"]})
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook_url"] == f"compose/observability/runbook.md#{alert.lower()}"
    [section] = re.findall(rf"^## {alert}\n\n(.*?)(?=^#|\Z)", RUNBOOK, re.M | re.S)
    assert len(section.split()) > 15


def test_the_runbook_has_no_section_for_an_alert_that_is_gone() -> None:
    assert set(re.findall(r"^## (Outrider\w+)$", RUNBOOK, re.M)) == set(ALERTS)


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-tls.yaml"])
def test_prometheus_reads_the_rules(name: str) -> None:
    config = yaml.safe_load((RULES.parent / name).read_text())
    assert config["rule_files"] == ["rules.yaml"]
