"""The pages' files over HTTP, and the questions that a bundle carries: what is served, to whom, and
what is refused."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.access.callers import ApiKey
from service.access.routes import SAMPLE_ROUTE
from service.annexes.feedback.store import Feedback
from service.api.app import HEADERS, pages
from service.audit.auditor import Auditor
from service.feedback.databases import location
from service.policies.guard import Action, Policy
from service.policies.policy import Policies, Rule, built_in
from service.serving.catalogue import RolloutPlan
from service.serving.judgement import Monitor
from tests.api.test_auth import bearer, named
from tests.api.test_score import send
from tests.judging.test_evaluation import SAMPLE
from tests.kit.api import check_error
from tests.kit.audit import audit_lines
from tests.kit.feedback import rows
from tests.kit.tables import values
from tests.matching import Held, matching_bundle
from tests.running import App, Running, app_of_module, running, until

PAGES, REFERENCE = pages(playground=True), pages(playground=False)
PLAYGROUND = [path for path in PAGES if not path.startswith("/docs")]
ROOT = Path(__file__).parent.parent.parent
KEY = "a-key-of-sixteen-letters"
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def carrying(engine: Any, folder: Path) -> Any:
    return matching_bundle(engine, folder, "carrying", evaluation={"sample": SAMPLE.document()})


app = app_of_module(
    add=[carrying], threshold=0.25, policy="observe", aliases_of=lambda _: {"live": 1}
)


# --- files ---


def test_every_page_and_file_is_served_with_the_policy(app: App) -> None:
    assert {"/", "/playground/app.js", "/playground/style.css"} <= set(PLAYGROUND)
    assert {"/docs", "/docs/swagger-ui-bundle.js"} <= set(REFERENCE)
    for path in PAGES:
        found, head = app.client.get(path), app.client.head(path)
        kind = path.rpartition(".")[2] if "." in path else "html"
        assert (found.status_code, found.headers["content-type"]) == (200, KINDS[kind]), path
        assert {name: found.headers[name] for name in HEADERS} == HEADERS
        assert len(found.content) > 100
        assert (head.status_code, head.content) == (200, b"")
        assert app.client.post(path).status_code == 405


@pytest.mark.parametrize(
    ("accepted", "compressed", "paths"),
    [
        ("gzip, deflate, br", True, PAGES),
        ("GZIP;q=0.5", True, ["/"]),
        ("identity", False, PAGES),
        ("gzip;q=0", False, ["/"]),
        ("gzip; q=0.0, br", False, ["/"]),
    ],
)
def test_pages_are_compressed_for_who_takes_that(
    app: App, accepted: str, compressed: bool, paths: Iterable[str]
) -> None:
    sizes = {}
    for path in paths:
        head, answer = (
            app.client.request(method, path, headers={"accept-encoding": accepted})
            for method in ("HEAD", "GET")
        )
        assert ("content-encoding" in answer.headers) is compressed, path
        assert answer.content == PAGES[path].read_bytes()
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]
        assert answer.headers["vary"] == "accept-encoding"
        sizes[path] = int(answer.headers["content-length"])
    assert (sizes.get("/docs/swagger-ui-bundle.js", 0) < 600_000) is compressed or paths == ["/"]


def test_a_page_names_and_imports_files_of_ours_only_and_the_package_takes_them_along() -> None:
    """A page holds no script or style of its own, which the policy would refuse."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["service"]
    own = [file for file in PAGES.values() if file.is_relative_to(ROOT / "service")]
    own.append(ROOT / "service" / "api" / "examples.json")
    assert len(own) > 10
    for file in own:
        text, name = file.read_text(), file.relative_to(ROOT / "service").as_posix()
        assert any(fnmatch(name, pattern) for pattern in patterns), name
        if file.suffix == ".html":
            assert {
                posixpath.normpath(f"/{named}")
                for named in re.findall(r'(?:src|href)="([^"#]+)"', text)
            } <= set(PAGES), name
            assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon[a-z]+=", text)
        if file.suffix == ".js" and file.parent.name == "playground":
            assert {
                f"/playground/{named}" for named in re.findall(r'from "\./([^"]+)"', text)
            } <= set(PAGES), name


def test_without_the_playground_only_the_reference_is_served(tmp_path: Path) -> None:
    """To whom: test_auth.py."""
    with App(tmp_path, playground=False).started() as app:
        others = ("/playground/", "/playground/../v1/none", "/docs/nothing.js", "/redoc")
        for path in (*PLAYGROUND, *others):
            check_error(app.client.get(path), 404, code="not_found")
        assert all(app.client.get(path).status_code == 200 for path in REFERENCE)


# --- one bundle, and the questions that it carries ---


@pytest.mark.parametrize("name", ["one", "one:1", "one@live"])
def test_one_bundle_with_what_a_picture_needs(app: App, name: str) -> None:
    answer = app.client.get(f"/v1/bundles/{name}").json()
    (card,) = [one for one in app.client.get("/v1/bundles").json()["data"] if one["id"] == "one:1"]
    assert {key: answer[key] for key in card} == card
    means = [answer["trajectories"][kind] for kind in ("hallucinated", "factual")]
    assert means == app.bundles[0].probes.trajectory_mean.tolist()
    assert (answer["coverage"]["source"], answer["sample"]) == ("own_threshold", None)
    check_error(app.client.get("/v1/bundles/none"), 404, param="bundle")


def asked(
    app: App, number: int | str, bundle: str = "carrying", status: int = 200
) -> dict[str, Any]:
    response = app.client.get(f"/v1/bundles/{bundle}/sample/{number}")
    assert response.status_code == status, response.text
    return dict(response.json())


def test_an_answer_has_the_risk_that_score_gives(app: App) -> None:
    answer = app.client.get("/v1/bundles/carrying").json()["sample"]
    assert answer["file"] == "rows.jsonl"
    assert answer["questions"][0] == {
        "prompt": "Capital of France?",
        "answers": ["Paris"],
        "kind": "capital",
    }
    one = asked(app, 0)
    scored = app.ask(prompt="Capital of France?", bundle="carrying")["data"][0]
    assert one["risk"] == pytest.approx(scored["risk"], abs=1e-6)
    assert (one["threshold"], one["flagged"]) == (0.25, scored["flagged"])
    assert (one["number"], one["kind"], one["accepted"]) == (0, "capital", ["Paris"])
    assert one["verdict"] in ("right", "wrong", "abstained")
    assert (one["decision"], one["answer"]) == ("continue", "It is so.")


@pytest.mark.parametrize(
    ("bundle", "number"), [*(("carrying", n) for n in ("2", "-1", "48")), ("one", "0")]
)
def test_what_it_does_not_carry_is_not_found(app: App, bundle: str, number: str) -> None:
    message = asked(app, number, bundle, 404)["error"]["message"]
    assert (
        message
        == f"{bundle}:1 carries {2 * (bundle != 'one')} questions, and none of number {number}"
    )


# --- what the policy withholds is shown nowhere, and a question of a bundle is asked as any other
# ---

ROUTES = [f"/v1/bundles/{name}/sample/0" for name in ("carrying", "carrying:1", "carrying@live")]
ALL: dict[str, Any] = {"threshold": 0.0}  # every prompt is flagged


def withholding(tmp_path: Path, **options: Any) -> App:
    return App(
        tmp_path, names=(), add=[carrying], **{"aliases_of": lambda _: {"live": 1}} | options
    )


def serving_questions(tmp_path: Path, **options: Any) -> AbstractContextManager[Running]:
    return running(tmp_path, names=(), add=[carrying], policy="observe", **options)


WITHHOLDING = [action for action in Action if action.withholds]


@pytest.mark.parametrize(("threshold", "shown"), [(0.0, False), (1.0, True)])
def test_a_withheld_answer_is_not_shown_and_not_decoded(
    tmp_path: Path, threshold: float, shown: bool
) -> None:
    policies = {str(action): Policy(str(action), action) for action in WITHHOLDING}
    with withholding(tmp_path, policies=policies, threshold=threshold).started() as app:
        for name in policies:
            app.state.settings = replace(app.state.settings, policy=name)
            for bundle in ("carrying", "carrying:1", "carrying@live"):
                for _ in range(2):  # the second time from what was answered before
                    answer = asked(app, 0, bundle)
                    assert answer["flagged"] is (answer["decision"] != "continue") is not shown
                    assert answer["answer"] == ("It is so." if shown else None)
                    assert (answer["verdict"] is None) is not shown
        assert (app.engine.counters.decode_steps > 0) is shown


def test_each_caller_is_judged_by_its_own_policy_whatever_was_answered_before(
    tmp_path: Path,
) -> None:
    allowed = {"free": ("observe",), "held": ("gate",), "any": None}
    keys = [named(name, policies=policies) for name, policies in allowed.items()]
    with withholding(tmp_path, api_keys=keys, **ALL).started() as app:
        app.state.catalogue.policies = Policies(built_in(), (Rule(policy="observe", key="free"),))
        for _ in range(2):  # the second time from what was answered before
            answers = {
                name: app.client.get(ROUTES[0], headers=bearer(name)).json()["answer"]
                for name in allowed
            }
            assert answers == {"free": "It is so.", "held": None, "any": None}
        app.state.catalogue.policies = Policies(built_in())  # of which none fits this key
        check_error(app.client.get(ROUTES[0], headers=bearer("free")), 403, param="policy")


def test_another_bundle_is_the_operators_to_allow(tmp_path: Path) -> None:
    with App(tmp_path, names=["one"], add=[carrying], callers_may=()).started() as app:
        check_error(app.client.get(ROUTES[0]), 403, param="bundle")
        assert app.engine.counters.decode_steps == 0


def test_it_is_audited_each_time_and_counted_where_the_model_was_asked(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    options: dict[str, Any] = {"audit": lambda _: Auditor(log), "api_keys": [ApiKey(KEY, "ann")]}
    with withholding(tmp_path, **options, **ALL).started() as app:
        before = app.engine.counters.prefills
        for number in range(3):
            headers = bearer(KEY) | {"x-request-id": f"r-{number}"}
            assert app.client.get(ROUTES[0], headers=headers).status_code == 200
        for number, line in enumerate(audit_lines(log, "decision")):
            assert (line["key"], line["request_id"]) == ("ann", f"r-{number}")
            assert (line["route"], line["policy"]) == (SAMPLE_ROUTE, "gate")
            assert line["prompts"][0]["decision"] == "abstain"
        assert number == 2
        app.client.headers.update(bearer(KEY))
        gated = app.series("gated_by_route_total", bundle="carrying:1", route=SAMPLE_ROUTE)
        assert gated == app.series("key_prompts_total", key="ann", withheld="yes") == 1
        assert app.series("http_requests_total", status="200") == 3
        assert app.engine.counters.prefills == before + 1
    assert "France" not in log.read_text()


def test_neither_feedback_nor_the_drift_monitor_nor_a_shadow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's own held-out questions are what training saw: they would hide that users ask
    other ones."""
    observed = list[int]()
    monkeypatch.setattr(
        Monitor, "observe", lambda self, reports, prompts: observed.append(len(prompts))
    )

    where = location(str(tmp_path / "feedback.db"))
    app = App(
        tmp_path,
        names=(),
        add=[carrying, lambda engine, folder: matching_bundle(engine, folder, "watching", 1)],
        feedback=lambda metrics: Feedback(where, metrics, share=1.0),
        policy="observe",
    )
    app.state.catalogue.plan = RolloutPlan(shadows=("watching:1",))
    with app.started():
        for call, told in ((lambda: asked(app, 0), 0), (lambda: app.ask(prompt="a"), 1)):
            call()
            _, shadow = app.client.get("/v1/bundles").json()["data"]
            assert (shadow["role"], shadow["compared"]["prompts"]) == ("shadow", told)
            assert len(observed) == told
    assert len(rows(where, "SELECT risk FROM hallutracer_answers")) == 1


def test_it_is_refused_where_the_queue_is_full_and_the_pages_are_not(tmp_path: Path) -> None:
    with serving_questions(tmp_path, max_queue=1, max_prompts=1) as service:
        service.engine.before = held = Held()
        first = send(service, {"prompt": "held"})
        assert held.entered.wait(20)
        check_error(httpx.get(service.url + ROUTES[0]), 429, code="overloaded")
        assert all(httpx.get(service.url + path).status_code == 200 for path in ("/", "/docs"))
        held.release.set()
        assert first.recv(4096).startswith(b"HTTP/1.1 200")
        first.close()
        until(lambda: service.series("http_requests_total") == 2)  # no page is counted
        assert "/playground" not in service.scraped()


def test_the_deadline_ends_it_where_the_engine_stands_still(tmp_path: Path) -> None:
    with serving_questions(tmp_path, deadline_s=0.2) as service:
        service.engine.before = held = Held()
        try:
            late = httpx.get(service.url + ROUTES[0], timeout=60)
        finally:
            held.release.set()
        check_error(late, 504, code="deadline_exceeded")


OTHERS = values(
    """
    {"sec-fetch-site": "cross-site"}
    {"sec-fetch-site": "same-site"}
    {"origin": "http://evil.test"}
    {"origin": "null", "sec-fetch-site": "cross-site"}
    {"origin": "http://localhost:3000"}
    """
)
OURS = values(
    """
    {}
    {"origin": "http://testserver"}
    {"sec-fetch-site": "same-origin"}
    {"sec-fetch-site": "none"}
    {"origin": "http://ours.test", "sec-fetch-site": "cross-site"}
    """
)


def test_a_page_of_another_site_cannot_have_a_browser_ask(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "observe", "cors_origins": ("http://ours.test",)}
    with withholding(tmp_path, **options).started() as app:
        before = app.engine.counters.prefills
        for [headers] in OTHERS:
            refused = app.client.get(ROUTES[0], headers=headers)
            assert "--cors-origin" in check_error(refused, 403, param="origin")["message"]
        assert app.engine.counters.prefills == before
        for [headers] in OURS:
            assert app.client.get(ROUTES[0], headers=headers).status_code == 200, headers
