"""POST /v1/admin/reload: keys and bundles together, each taken where it can be, each told and
audited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from probes_store.errors import BundleNotFound
from service.access.callers import Key
from service.access.keys import Changes, KeyRing
from service.access.routes import RELOAD_ROUTE
from service.audit.auditor import Auditor, Who
from service.cli.running import Stamps, watch
from service.engines.base import Engine
from service.scoring import Scorer
from service.serving.catalogue import RolloutPlan
from tests.api.test_auth import bearer, named
from tests.kit.api import check_error
from tests.kit.audit import audit_lines, broken_log
from tests.kit.key_files import add_key, revoke_key
from tests.running import App, until

SIGNAL = Who(by="signal")


@dataclass
class Served:
    app: App
    keys: Path
    secret: str  # of the administrator
    log: Path
    gone: list[str] = field(default_factory=list)  # why the bundles cannot be loaded

    def reload(self) -> httpx.Response:
        return self.app.client.post(RELOAD_ROUTE, headers=bearer(self.secret))

    def lines(self, event: str) -> list[dict[str, Any]]:
        return audit_lines(self.log, event)

    def finds(self, secret: str) -> bool:
        return self.app.state.access.keys.find(secret) is not None

    def default(self) -> str:
        return str(self.app.state.catalogue.scorers[0].bundle.reference)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # What is told is told by the reload.
    monkeypatch.setattr("service.serving.service.WATCH_S", 600.0)
    path, log = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    secret = add_key(path, "operator", {"scopes": ["admin"]})
    app = App(tmp_path, keys_file=path, audit=lambda _: Auditor(log))
    served = Served(app, path, secret, log)

    def load(engine: Engine) -> dict[str, Scorer]:
        if served.gone:
            raise BundleNotFound(served.gone[0])
        return {bundle.reference: Scorer(engine, bundle) for bundle in app.bundles}

    app.state.lifecycle.load_again = load
    with app.started():
        yield served


def test_one_reload_takes_keys_and_bundles(served: Served) -> None:
    two = add_key(served.keys, "two", {"scopes": ["score"]})
    served.app.bundles.reverse()
    answer = served.reload()
    assert (answer.status_code, answer.json()["data"][0]["id"]) == (200, "two:1")
    assert served.finds(two)
    begun, done = served.lines("bundles.reload")
    for line, outcome in ((begun, "begun"), (done, "done")):
        assert (line["key"], line["by"], line["outcome"]) == ("operator", "api", outcome)
    before = [
        {"bundle": bundle.reference, "digest": bundle.manifest.digest, "role": role}
        for bundle, role in zip(reversed(served.app.bundles), ("default", "none"), strict=True)
    ]
    assert begun["what"] == {"before": before}
    assert [one["bundle"] for one in done["what"]["after"]] == ["two:1", "one:1"]
    assert served.lines("keys.reload")[1]["key"] == "operator"


def test_each_failure_is_told_by_itself_and_keeps_the_other_from_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    good, kept = served.keys.read_text(), f"keys: the keys in force stay: {served.keys}"

    def refused() -> str:
        return str(check_error(served.reload(), 409, code="reload_failed")["message"])

    served.keys.write_text(good + "typo\n")
    served.app.bundles.reverse()
    for _ in range(2):  # the second time, too
        caplog.clear()
        message = refused()
        assert (kept in message, message.endswith("bundles: swapped")) == (True, True)
        assert "the keys in force stay" in caplog.text
    assert served.default() == "two:1"
    served.gone.append("one:1 is gone")
    both = refused()
    assert served.app.series("reloads_total", outcome="failed") == 1
    assert kept in both
    assert "not swapped, those that were loaded stay: one:1 is gone" in both
    served.keys.write_text(good)
    two = add_key(served.keys, "two", {"scopes": ["score"]})
    assert refused().startswith("keys: as their file says; bundles: not swapped")
    assert (served.finds(two), served.default()) == (True, "two:1")
    assert served.lines("bundles.reload")[-1]["what"]["error"].endswith("one:1 is gone")
    served.gone.clear()
    assert served.reload().status_code == 200


def test_without_the_audit_log_nothing_is_added_or_swapped(served: Served) -> None:
    served.app.bundles.reverse()
    with broken_log(served.log):
        two = add_key(served.keys, "two", {"scopes": ["score"]})
        error = check_error(served.reload(), 503, code="audit_unavailable")
        assert "no key was added or changed" in error["message"]
        assert (served.finds(two), served.default()) == (False, "one:1")
        assert "audit log" in str(served.app.state.lifecycle.reload_error)
    assert served.reload().status_code == 200
    assert (served.finds(two), served.default()) == (True, "two:1")


def test_while_it_loads_keys_are_taken_and_told_all_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.app.state.lifecycle, "_dispatcher", None)
    two = add_key(served.keys, "two", {"scopes": ["score"]})
    message = check_error(served.reload(), 503, code="not_ready")["message"]
    assert message.startswith("keys: as their file says; bundles: not")
    assert "still loading" in message
    assert served.finds(two)
    served.keys.write_text("[")
    error = check_error(served.reload(), 503, code="not_ready")
    assert "the keys in force stay" in error["message"]
    monkeypatch.undo()


def watching(served: Served, look: Callable[[], Stamps], seconds: float) -> None:
    portal = served.app.client.portal
    assert portal is not None
    portal.call(lambda: watch(served.app.state, look, {"mine": "one"}, seconds))


def test_a_moved_alias_that_could_not_be_audited_is_taken_once_it_can_be(served: Served) -> None:
    resolved, looks = ["one"], list[str]()

    def look() -> Stamps:
        looks.append(resolved[0])
        return {"mine": resolved[0]}

    served.app.bundles.reverse()
    watching(served, look, 0.02)
    until(lambda: looks)
    with broken_log(served.log):
        resolved[0] = "two"
        until(lambda: served.app.state.lifecycle.reload_error is not None)
        assert served.default() == "one:1"
    until(lambda: served.default() == "two:1")
    assert served.lines("bundles.reload")[-1]["by"] == "alias"


def test_what_fails_is_not_tried_at_every_look(served: Served) -> None:
    looks = list[str]()

    def look() -> Stamps:
        looks.append("one" if len(looks) < 2 else "two")
        return {"mine": looks[-1]}

    served.gone.append("one:1 is gone")
    watching(served, look, 0.005)
    until(lambda: len(looks) > 100)
    assert 2 <= sum(line["outcome"] == "failed" for line in served.lines("bundles.reload")) <= 20
    served.gone.clear()
    served.app.bundles.reverse()
    assert served.reload().status_code == 200


def test_a_key_that_is_revoked_while_an_older_file_is_read_stays_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    app = App(tmp_path, names=["tiny"], keys_file=path)
    add_key(path, "two", {"scopes": ["score"]})
    read = KeyRing.read
    first = threading.Event()
    go_on = threading.Event()

    def slow(ring: KeyRing) -> tuple[dict[str, Key], Changes]:
        result = read(ring)
        if not first.is_set():
            first.set()
            assert go_on.wait(20)
        return result

    monkeypatch.setattr(KeyRing, "read", slow)

    async def both() -> None:
        older = asyncio.create_task(app.state.access.reload(SIGNAL))
        await asyncio.to_thread(first.wait, 20)
        revoke_key(path, "one")
        newer = asyncio.create_task(app.state.access.reload(SIGNAL))
        await asyncio.sleep(0.05)  # it would be done by now
        go_on.set()
        await asyncio.gather(older, newer)

    asyncio.run(both())
    result = app.state.access.keys.find(one)
    assert result is not None
    assert result.revoked is not None


def test_a_reader_that_fails_otherwise_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.service.WATCH_S", 0.02)
    path = tmp_path / "keys.toml"
    add_key(path, "one", {"scopes": ["score"]})
    read, fails = KeyRing.read, [True]

    def failing(ring: KeyRing) -> tuple[dict[str, Key], Changes]:
        if fails:
            fails.pop()
            raise MemoryError
        return read(ring)

    monkeypatch.setattr(KeyRing, "read", failing)
    with App(tmp_path, names=["tiny"], keys_file=path).started() as app:
        two = add_key(path, "two", {"scopes": ["score"]})
        until(lambda: app.state.access.keys.find(two) is not None)
        assert not fails


def test_a_canary_takes_no_key_past_its_policies(tmp_path: Path) -> None:
    keys = [named("app", policies=("gate",))]
    app = App(tmp_path, names=("one", "two", "three"), api_keys=keys, callers_may=())
    app.state.catalogue.plan = RolloutPlan("two:1", 1.0, ("three:1",))
    with app.started():
        fields = {"headers": bearer("app"), "prompt": "a"}
        judged = app.ask(**fields)
        assert (judged["bundle"]["name"], judged["policy"]) == ("two", "gate")
        policies = app.state.catalogue.policies.named.keys() - {"gate"}
        for name, values in (("policy", policies), ("bundle", ("two", "three", "three:1"))):
            for value in values:
                refused = app.ask(status=403, **fields | {name: value})
                assert refused["error"]["param"] == name, value
