"""The service, Prometheus and the dashboards together: every query that we ship meets real numbers."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.serving.metrics import STATUS_OF
from service.serving.monitor import CAUSES
from tests.deploy import dashboards
from tests.deploy.live_service import BUNDLES, Traffic, serving
from tests.deploy.packaging import flags
from tests.deploy.prometheus_server import OURS, REQUIRE, ROOT, Prometheus, binary, configuration, promtool, running

SECONDS = 6.0  # of traffic: longer than the four scrapes that a rate looks back on
MODEL = "hallutracer-demo"
RULES = sorted((OURS / "rules").glob("*.yml"))
CONFIGURATIONS = pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
BOARDS = pytest.mark.parametrize("path", dashboards.FILES, ids=lambda path: path.stem)


def rules(kind: str) -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if kind in rule]


# --- the files by themselves ---


def test_promtool_accepts_the_configuration_and_every_rule() -> None:
    for command, files in {"config": [OURS / "prometheus.yml"], "rules": RULES}.items():
        done = promtool("check", command, *files)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_where_they_should_and_nowhere_else() -> None:
    done = promtool("test", "rules", *sorted((OURS / "rules" / "tests").glob("*.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [*RULES, *dashboards.FILES], ids=lambda path: path.name)
def test_a_cure_names_flags_that_serve_has(path: Path) -> None:
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", path.read_text())) <= set(flags()["serve"])


@pytest.mark.parametrize("alert", rules("alert"), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do_and_is_tested(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"warning", "critical"}
    assert {"summary", "description"} <= set(alert["annotations"])
    tests = yaml.safe_load((OURS / "rules" / "tests" / "alerts.yml").read_text())["tests"]
    fired = [row["labels"] for test in tests for one in test["promql_expr_test"] for row in one["exp_samples"]]
    assert [labels for labels in fired if f'alertname="{alert["alert"]}"' in labels]


def test_an_alert_leads_to_its_runbook() -> None:
    """MyST and GitHub make the anchor of a heading from its lower-case letters; tests/docs builds the page."""
    page = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules("alert")}
    assert set(sections) == set(alerts)
    for name, url in alerts.items():
        assert url == f"docs/runbooks.md#{name.lower()}"
        _, *parts = re.split(r"\*\*(What it means|How to look|What to do)\.?\*\*", sections[name])
        assert parts[::2] == ["What it means", "How to look", "What to do"], name
        assert all(len(text) > 60 for text in parts[1::2]), name


def test_an_alert_leads_to_a_panel_of_what_it_reads() -> None:
    """By the panel's number; recorded series stand for those that they are made of."""
    made_of = {rule["record"]: dashboards.names(rule["expr"]) for rule in rules("record")}

    def read(expression: str) -> set[str]:
        return dashboards.names(expression).union(*(made_of.get(name, set()) for name in dashboards.names(expression)))

    boards = {board["uid"]: board for board in map(dashboards.load, dashboards.FILES)}
    for rule in rules("alert"):
        found = re.fullmatch(r"/d/([\w-]+)\?viewPanel=(\d+)", rule["annotations"]["dashboard_url"])
        assert found, rule["alert"]
        [panel] = [one for one in dashboards.panels(boards[found[1]]) if one["id"] == int(found[2])]
        shown = set().union(*(read(target["expr"]) for target in panel["targets"]))
        wanted = {"hallutracer_ready"} if rule["alert"] == "HalluTracerDown" else read(rule["expr"])
        assert shown & wanted, (rule["alert"], panel["title"])


def test_every_cause_of_a_void_promise_has_a_text_and_a_cure() -> None:
    [rule] = [rule for rule in rules("alert") if rule["alert"] == "HalluTracerPromiseVoid"]
    named = re.findall(r'eq \$labels\.cause\s+"(\w+)"', rule["annotations"]["description"])
    assert [*named, "golden"] == list(CAUSES)  # the last is the template's else
    page = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    runbook = page.split("## HalluTracerPromiseVoid")[1].split("\n## ")[0]
    assert [cause for cause in CAUSES if f"- `{cause}`" not in runbook] == []


@pytest.mark.parametrize(
    "expression", [rule["expr"] for rule in rules("expr")] + [query.expression for query in dashboards.queries()]
)
def test_an_expression_reads_metrics_and_labels_that_exist(expression: str) -> None:
    known = dashboards.ours() | {rule["record"]: dashboards.grouping(rule["expr"]) for rule in rules("record")}
    used = dashboards.matchers(expression)
    for metric, labels in used.items():
        assert labels <= known[metric], metric
        assert dashboards.grouping(expression) <= known[metric] | {"le"}, metric
    assert used or "up{" in expression


def test_every_metric_is_on_a_panel_and_every_panel_shows_one() -> None:
    shown = {query: dashboards.names(query.expression) for query in dashboards.queries()}
    assert [query for query, names in shown.items() if not names] == []
    used = set().union(*shown.values())
    assert set(dashboards.ours()) - used == set()


@BOARDS
def test_a_dashboard_is_well_formed(path: Path) -> None:
    board = dashboards.load(path)
    panels = list(dashboards.panels(board))
    assert board["schemaVersion"] >= 39
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    kinds = {one["type"] for one in board["templating"]["list"] if one["name"] == "datasource"}
    assert kinds == {"datasource"}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        options = panel["options"].get("yAxis", {}) | panel["fieldConfig"]["defaults"]
        assert "unit" in options or panel["type"] in {"table", "heatmap"}, panel["title"]


@BOARDS
def test_a_dropdown_holds_for_every_panel(path: Path) -> None:
    offered = {one["name"] for one in dashboards.load(path)["templating"]["list"] if one["type"] == "query"}
    assert offered == set(dashboards.SCRAPED) | ({"model_name", "bundle"} if path.stem == "risk" else set())
    for query in (query for query in dashboards.queries() if query.dashboard == path.stem):
        used = {one for pair in re.findall(r"\$(?:\{(\w+)\}|(\w+))", query.expression) for one in pair if one}
        assert {name for name in used if not name.startswith("__")} == offered, query.panel


@BOARDS
def test_panels_fill_the_grid_without_overlap(path: Path) -> None:
    """Those that are seen at once, and those of each folded row once it is opened."""
    board = dashboards.load(path)
    folded = [panel["panels"] for panel in board["panels"] if panel.get("panels")]
    assert folded
    for panels in (board["panels"], *folded):
        taken: Counter[tuple[int, int]] = Counter()
        for panel in panels:
            place = panel["gridPos"]
            assert place["w"] >= 3
            assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
            area = [(x, y) for x in range(place["w"]) for y in range(place["h"])]
            taken.update((place["x"] + x, place["y"] + y) for x, y in area)
        assert set(taken.values()) == {1}
        assert len(taken) == 24 * (1 + max(y for _, y in taken) - min(y for _, y in taken))


@BOARDS
def test_no_expression_fixes_a_job(path: Path) -> None:
    for query in (query for query in dashboards.queries() if query.dashboard == path.stem):
        assert not re.search(r'\bjob\s*=\s*"', query.expression), query.panel


def test_the_first_dashboard_begins_with_what_one_is_called_for() -> None:
    [board] = [dashboards.load(path) for path in dashboards.FILES if path.stem == "service"]
    first = [panel["title"] for panel in board["panels"] if panel["gridPos"]["y"] == 0]
    assert first == ["Ready", "Error rate", "What the guard adds", "Withheld", "Outside training", "Requests"]
    seen = [panel["title"] for panel in board["panels"] if panel["type"] != "row"]
    assert {"Withheld share by route", "Risk by conversation", "Prompts by caller"} <= set(seen)


def test_dashboards_link_to_each_other_by_uid() -> None:
    boards = [dashboards.load(path) for path in dashboards.FILES]
    uids = [board["uid"] for board in boards]
    assert len(set(uids)) == len(uids) == 3
    for board in boards:
        assert {link["url"].removeprefix("/d/") for link in board["links"]} == set(uids) - {board["uid"]}


def test_grafana_samples_as_often_as_prometheus_scrapes() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "prometheus.yml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == configured("prometheus.yml")["global"]["scrape_interval"]


@CONFIGURATIONS
def test_alerts_look_for_the_job_that_is_scraped(name: str) -> None:
    jobs = {job["job_name"] for job in configured(name)["scrape_configs"]}
    named = {job for rule in rules("expr") for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert named == jobs


@CONFIGURATIONS
def test_both_configurations_load_the_rules(name: str) -> None:
    assert {path for pattern in configured(name)["rule_files"] for path in OURS.glob(pattern)} == set(RULES)


def test_the_error_share_counts_every_code_that_is_ours() -> None:
    """A code that is new, in service/errors.py or elsewhere, must be sorted into the rule or left out of it here."""
    [rule] = [rule for rule in rules("record") if rule["record"] == "hallutracer:server_errors:ratio_rate5m"]
    [listed] = re.findall(r'hallutracer_errors_total\{code=~"([a-z_|]+)"\}', rule["expr"])
    assert listed.split("|") == sorted(code for code, status in STATUS_OF.items() if status >= 500)


def configured(name: str) -> Any:
    return yaml.safe_load((OURS / name).read_text())


# --- where the tools come from ---


def test_tools_are_found_on_the_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus", "promtool", "nginx", "helm", "initdb", "postgres", "chromium"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert binary("promtool") == str(tmp_path / "promtool")
    done = subprocess.run([ROOT / "deploy" / "tools.sh"], capture_output=True, text=True, check=True)
    assert done.stdout == "prometheus, promtool, nginx, helm, initdb, postgres and chromium are on PATH\n"


def test_tools_that_are_required_and_missing_fail_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=r"deploy/tools\.sh"):
        binary("no-such-tool")
    monkeypatch.delenv(REQUIRE)
    with pytest.raises(pytest.skip.Exception, match=r"deploy/tools\.sh"):
        binary("no-such-tool")


# --- everything together ---


@dataclass(frozen=True)
class Scene:
    """A Prometheus that has watched a service under traffic from ``began`` to ``ended``."""

    prometheus: Prometheus
    traffic: Traffic
    began: float
    ended: float


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("observed")
    binary("prometheus")
    with serving(folder / "store") as url:
        config = configuration(folder / "prometheus", url.removeprefix("http://"))
        with running(config, folder / "tsdb") as prometheus:
            await_value(prometheus, 'up{job="hallutracer"}', 1)  # the zeros are scraped before the first request
            traffic = Traffic(url)
            began, ended = traffic.run(SECONDS)
            await_value(prometheus, "sum(hallutracer_http_requests_total)", traffic.statuses.total())
            # Then a rule's turn over the last scrape, which makes its shares exact.
            refused = traffic.codes["overloaded"] / traffic.statuses.total()
            await_value(prometheus, "hallutracer:http_overloaded:ratio_rate5m", refused)
            yield Scene(prometheus, traffic, began, ended)


def await_value(prometheus: Prometheus, expression: str, expected: float) -> None:
    found: list[float] = []
    for _ in range(100):
        found = list(prometheus.query(expression, time.time()).values())
        if found == [pytest.approx(expected)]:
            return
        time.sleep(0.1)
    pytest.fail(f"{expression} is {found}, not {expected}")


def test_prometheus_counts_what_the_client_saw(scene: Scene) -> None:
    seen = scene.traffic
    assert seen.statuses[200]
    assert {"invalid_json", "invalid_request", "prompt_too_long", "overloaded"} <= set(seen.codes)
    now = time.time()
    for metric, label, expected in (
        ("http_requests_total", "status", {str(status): n for status, n in seen.statuses.items()}),
        ("errors_total", "code", dict(seen.codes)),
    ):
        found = scene.prometheus.query(f"sum by ({label}) (hallutracer_{metric}) > 0", now)
        assert found == {str({label: key}): float(n) for key, n in expected.items()}
    found = scene.prometheus.query("sum by (bundle, decision) (hallutracer_prompts_total) > 0", now)
    expected_prompts = {str({"bundle": b, "decision": d}): float(n) for (b, d), n in seen.decisions.items()}
    assert found == expected_prompts
    assert {decision for _, decision in seen.decisions} == {"continue", "abstain", "block"}


def test_recorded_shares_are_those_that_the_client_saw(scene: Scene) -> None:
    seen, now = scene.traffic, time.time()
    for name in BUNDLES:
        bundle = f"{name}:1"
        total = sum(n for (other, _), n in seen.decisions.items() if other == bundle)
        gated = total - seen.decisions[bundle, "continue"]
        for record, count in {"gated": gated, "flagged": seen.flagged[bundle]}.items():
            found = scene.prometheus.query(f'hallutracer:{record}_share:rate5m{{bundle="{bundle}"}}', now)
            assert list(found.values()) == [pytest.approx(count / total)]
        assert 0 < gated < seen.flagged[bundle] < total  # where the policy observed, flagged prompts went on


def test_every_rule_is_loaded_and_healthy(scene: Scene) -> None:
    loaded = scene.prometheus.rules()
    assert {rule["name"] for rule in loaded} == {rule.get("record") or rule["alert"] for rule in rules("expr")}
    assert {rule["name"]: rule.get("lastError") for rule in loaded if rule["health"] != "ok"} == {}


@pytest.mark.parametrize("record", [rule["record"] for rule in rules("record")])
def test_every_recording_rule_has_finite_values(scene: Scene, record: str) -> None:
    found = scene.prometheus.query(record, scene.ended)
    assert found
    assert all(math.isfinite(value) for value in found.values())
    if "share" in record or "ratio" in record:
        assert all(0 <= value <= 1 for value in found.values())


@pytest.mark.parametrize("query", dashboards.queries(), ids=lambda query: f"{query.dashboard}/{query.panel}")
def test_every_panel_query_has_finite_values(scene: Scene, query: dashboards.Query) -> None:
    start, end = scene.began, scene.ended
    for model_name, bundle in [(".*", ".*"), (MODEL, f"{BUNDLES[0]}:1")]:  # all, or one of each
        expression = query.filled(model_name, bundle, end - start)
        if query.instant:
            found = {key: [value] for key, value in scene.prometheus.query(expression, end).items()}
        else:
            found = scene.prometheus.query_range(expression, start, end, 1.0)
        # No key is asked for, neither bundle has a guarantee, and no window of 1,000 prompts is full.
        if any(name in query.expression for name in ("key_prompts", "guarantee_info", "hallutracer_drift")):
            assert found == {}
            continue
        assert found, expression
        assert all(math.isfinite(value) for values in found.values() for value in values), expression
        assert any(value > 0 for values in found.values() for value in values) or expects_zero(query), expression


def expects_zero(query: dashboards.Query) -> bool:
    """No failure is ours in this traffic, nothing is sent on, reloaded or void, a gauge is what it happens to be, and
    the shipped bundles cannot tell which prompts are unlike training, or ask for no fact."""
    sampled = {"hallutracer_queue_depth", "hallutracer_running_decodes", "hallutracer_requests_in_flight"}
    never = (
        "audit_unavailable", "outside_training", "upstream_requests", "keys_stale", "reloads_total", "hallutracer_void",
        "no_fact", "key_prompts",
    )  # fmt: skip
    return any(name in query.expression for name in never) or dashboards.names(query.expression) <= sampled


@BOARDS
def test_the_variables_offer_what_is_loaded(scene: Scene, path: Path) -> None:
    offered = {}
    for one in dashboards.load(path)["templating"]["list"]:
        if one["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])
            assert found
            selector = re.sub(r"\$\w+", ".*", found[1])
            offered[one["name"]] = scene.prometheus.get(f"label/{found[2]}/values", **{"match[]": selector})
    [instance] = offered.pop("instance")
    assert instance.startswith("127.0.0.1:")
    assert (offered.pop("job"), offered.pop("namespace")) == (["hallutracer"], [])  # not in a cluster
    every = {"model_name": [MODEL], "bundle": sorted(f"{name}:1" for name in BUNDLES)}
    assert offered == (every if path.stem == "risk" else {})
