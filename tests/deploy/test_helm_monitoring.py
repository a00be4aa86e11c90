"""Alerts and the dashboard: every expression parses and uses existing metrics."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fedone_sdk.aggregator.prometheus import _RUN_FIGURES, Metrics
from fedone_sdk.aggregator.telemetry import Observers
from tests.deploy.helm_chart import CASES, CHART, render
from tests.integration.test_observing import exposition, serving, work
from tests.processes import tool

SCRAPED = {"job", "namespace"}
"""Labels that Prometheus adds."""
ROOT = CHART.parents[2]
RULES = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def filled_in(expression: str) -> str:
    """An expression as Grafana sends it."""
    values = {"$__rate_interval": "1m", "$job": ".*", "$run": ".*"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", filled_in(target["expr"])


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(part: object) -> None:
        if isinstance(part, promql_parser.MatrixSelector):
            part = part.vector_selector
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


async def figures() -> dict[str, set[str]]:
    """Each series that a real service shows after a round, with the labels that it has."""
    async with serving(Observers(metrics=Metrics())) as service:
        await work(service)
        text = await exposition(service)
    # Figures of the verdict come with the end of a run.
    found = {
        f"fedone_{name}": {"run", *labels}
        for name, _, _, labels in _RUN_FIGURES
        if name in ("run_metric", "run_gain")
    }
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES.get(family.type, ()):
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_alerts_and_panels_ask_for_figures_that_there_are() -> None:
    there = await figures()
    assert "fedone_run_mean_loss" in there, "a round is done"
    asked = set()
    for name, expression in expressions():
        used = selectors(expression)
        assert used, name
        for selector in used:
            assert selector.name in there, f"{name}: no metric {selector.name}"
            labels = {matcher.name for matcher in selector.matchers.matchers}
            unknown = labels - there[selector.name] - SCRAPED
            assert not unknown, f"{name}: {selector.name} has no label {unknown}"
            asked.add(selector.name)
    for query in (v["definition"] for v in DASHBOARD["templating"]["list"] if "definition" in v):
        metric = query.removeprefix("label_values(").partition("{")[0].partition(",")[0]
        assert metric in there
    # A new metric belongs on the dashboard.
    bases = {
        name.removesuffix("_count").removesuffix("_sum").removesuffix("_bucket") for name in there
    }
    shown = {name.removesuffix("_count").removesuffix("_bucket") for name in asked}
    assert {name for name in bases if not name.endswith("_created")} - shown == set()


def test_alerts_have_descriptions() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^a-z -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not heading or heading in anchors


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    rows: dict[int, int] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        rows[place["y"]] = rows.get(place["y"], 0) + place["w"]
    assert set(rows.values()) == {24}
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_a_release_brings_them() -> None:
    manifests = render(CASES["replicas on a database of one's own"])
    (rule,) = manifests.of_kind("PrometheusRule")
    assert rule["spec"] == RULES, "Prometheus' own templates are left alone"
    docs = {"monitoring": {"prometheusRule": {"enabled": True, "docs": "https://docs.example/"}}}
    (rule,) = render(docs).of_kind("PrometheusRule")
    urls = [one["annotations"]["runbook_url"] for one in rule["spec"]["groups"][0]["rules"]]
    assert {url.partition("/operations/")[0] for url in urls[:8]} == {"https://docs.example"}
    dashboard = manifests.get("ConfigMap", "fedone-dashboard")
    assert json.loads(dashboard["data"]["fedone.json"]) == DASHBOARD
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    (monitor,) = manifests.of_kind("ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["tuning"]}
    wanted = monitor["spec"]["selector"]["matchLabels"]
    (service,) = (
        s for s in manifests.of_kind("Service") if wanted.items() <= s["metadata"]["labels"].items()
    )
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == ports == {"metrics"}


def check_firing(folder: Path, series: dict[str, str], expected: dict[str, set[str]]) -> None:
    """Has Prometheus work out which alerts fire when, of series with a value a minute."""
    promtool = tool("promtool", "apt-get install prometheus")
    scraped = 'job="fedone",namespace="tuning"'
    document = {
        "rule_files": [str(CHART / "files" / "alerts.yaml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name.replace("}", f",{scraped}}}"), "values": values}
                    for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": time,
                        "exp_samples": [
                            {"labels": f'{{alertname="{name}"}}', "value": 1}
                            for name in sorted(names)
                        ],
                    }
                    for time, names in expected.items()
                ],
            }
        ],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_tells_that_all_replicas_are_gone(tmp_path: Path) -> None:
    check_firing(
        tmp_path,
        {
            'fedone_leader{instance="a"}': "1x10 stale _x500",
            'fedone_leader{instance="b"}': "0x5 stale _x500",
            'fedone_replicas{instance="a"}': "1x10 stale _x500",
            'fedone_runs{instance="a",status="running"}': "1x10 stale _x500",
        },
        # One that is left is another alert's; one that is taken down for good is forgotten.
        {"10m": set(), "15m": set(), "17m": {"FedOneDown"}, "6h": {"FedOneDown"}, "7h": set()},
    )


@pytest.mark.parametrize(
    ("series", "alert"),
    [
        ({'fedone_leader{instance="a"}': "1x5 0x20"}, "FedOneNoLeader"),
        (
            {
                'fedone_run_left{run="run",unit="tokens"}': "20x5 4x5",
                'fedone_run_spent_total{run="run",unit="tokens"}': "80x5 95x5",
                'fedone_run_leased{run="run",unit="tokens"}': "0x5 1x5",
            },
            "FedOneBudgetNearlySpent",
        ),
    ],
)
def test_an_alert_tells_of_no_leader_or_budget(
    tmp_path: Path, series: dict[str, str], alert: str
) -> None:
    check_firing(tmp_path, series, {"5m": set(), "8m": {alert}})


def test_an_alert_tells_that_a_run_was_not_worth_its_price(tmp_path: Path) -> None:
    gains = {"worse": (-0.3, -0.1), "cheap": (-0.1, 0.2), "luck": (-0.1, 0.2), "better": (0.1, 0.2)}
    series = {
        f'fedone_run_gain{{run="{run}",bound="{bound}"}}': f"_x4 {value}x5"
        for run, ends in gains.items()
        for bound, value in zip(("low", "high"), ends, strict=True)
    }
    prices = {"cheap": 1, "luck": 11, "better": 11}
    series |= {f'fedone_run_spent_usd{{run="{run}"}}': f"{p}x9" for run, p in prices.items()}
    check_firing(tmp_path, series, {"3m": set(), "6m": {"FedOneRunWorse", "FedOneRunNotWorthIt"}})


@pytest.mark.parametrize("values", ["0x20 1x10", "_x21 1x10"], ids=["command", "start"])
def test_an_alert_tells_that_access_changed(tmp_path: Path, values: str) -> None:
    check_firing(
        tmp_path,
        {
            'fedone_access_changes_total{change="token_revoked",instance="a"}': values,
            'fedone_access_changes_total{change="token_created",instance="a"}': "0x5 90x25",
        },
        {"19m": set(), "23m": {"FedOneAccessChanged"}},
    )
