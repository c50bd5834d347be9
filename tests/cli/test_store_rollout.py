"""A running service whose store is at a URL: what it follows, what it refuses, and what it does
without an answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from probes_store.bucket import Objects
from probes_store.errors import BundleNotFound, StoreRefused, StoreUnreachable
from probes_store.store import Store, Trust
from probes_store.trust import Signing, required_signature
from service.cli import running as reloading
from service.cli.options import UsageError
from service.cli.running import Stamps, load_again, stamps, watch
from service.cli.serve_options import RolloutOptions
from service.errors import NotFound
from service.serving.catalogue import Loaded, RolloutPlan
from service.serving.service import Lifecycle, Service
from tests.kit.key_pairs import key_pair
from tests.matching import matching_draft
from tests.running import App
from tests.scripted_engine import ScriptedEngine

DEFAULT, CANARY, SHADOW = "mine@production", "mine@canary", "mine@shadow"
NAMES = (DEFAULT, CANARY, SHADOW)
ROLLED_OUT = ["mine:1 default", "mine:2 canary", "mine:2 shadow"]


@dataclass
class Remote:
    """A store at a URL, as its publisher has it and as a service reads it."""

    url: str
    publisher: Store
    reader: Store  # requires a signature
    sign: Callable[[str], object]
    down: Callable[
        [type[Exception] | None, str], None
    ]  # from now on: what is raised, for paths that hold a text

    def roll_out(self) -> None:
        """mine:2, signed, becomes canary and shadow."""
        self.sign("mine:2")
        self.offer()

    def offer(self) -> None:
        """mine:2 becomes canary and shadow."""
        for alias in ("canary", "shadow"):
            self.publisher.set_alias("mine", alias, 2)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """mine:1 and mine:2, of which the first is signed and production."""
    url, keys = f"memory://{tmp_path.name}", key_pair(tmp_path, "ours")
    publisher = Store(url, cache=tmp_path / "publisher")
    reader = Store(
        url, cache=tmp_path / "reader", trust=Trust(required_signature(str(keys.public)))
    )
    wrong: list[tuple[type[Exception], str]] = []
    for method in ("children", "read"):
        real = getattr(Objects, method)

        def ask(self: Objects, *parts: Any, real: Callable[..., Any] = real) -> Any:
            for kind, text in wrong:
                if text in "/".join(map(str, parts)):
                    raise kind("no answer: the network is down")
            return real(self, *parts)

        monkeypatch.setattr(Objects, method, ask)

    def down(kind: type[Exception] | None, text: str = "") -> None:
        wrong[:] = [] if kind is None else [(kind, text)]

    made = Remote(
        url, publisher, reader, lambda name: publisher.sign(name, Signing(keys.private)), down
    )
    publish_two(publisher)
    made.sign("mine:1")
    return made


def publish_two(store: Store) -> None:
    """mine:1 and mine:2, of which the first is production."""
    for seed in range(2):
        store.publish(matching_draft(ScriptedEngine(), "mine", seed))
    store.set_alias("mine", "production", 1)


@pytest.fixture
def app(tmp_path: Path, remote: Remote) -> Iterator[App]:
    app = App(tmp_path, names=("other",))
    left_out: Any = app.state.lifecycle.left_out
    app.state.catalogue.plan = RolloutPlan(CANARY, 0.5, (SHADOW,))
    app.state.lifecycle.load = lambda: load_again(
        left_out, app.served, remote.reader, NAMES, NAMES[1:]
    )
    app.state.lifecycle.load_again = lambda engine: load_again(
        left_out, engine, remote.reader, NAMES, NAMES[1:], app.state.catalogue.matching
    )
    with app.started():
        yield app


def reload(app: App, status: int = 200) -> httpx.Response:
    """As an administrator on the service's machine."""
    response = type(app.client)(app.app, client=("127.0.0.1", 5)).post("/v1/admin/reload")
    assert response.status_code == status, response.text
    return response


def roles(app: App) -> list[str]:
    rows = app.client.get("/v1/bundles").json()["data"]
    return [f"{row['id']} {row['role']}" for row in rows]


def status(app: App) -> Any:
    return app.client.get("/v1/bundles").json()["status"]


def left_out(app: App) -> dict[str, str]:
    return {row["reference"]: row["reason"] for row in status(app)["left_out"]}


def test_whoever_moves_an_alias_without_the_key_serves_nothing(app: App, remote: Remote) -> None:
    assert ["has no alias" in left_out(app)[name] for name in (CANARY, SHADOW)] == [True, True]
    remote.publisher.set_alias("mine", "production", 2)
    assert "a signature is required here" in reload(app, 409).text
    assert roles(app) == ["mine:1 default"]
    assert app.client.post("/score", json={"prompt": "a"}).json()["bundle"]["version"] == 1
    remote.publisher.set_alias("mine", "production", 1)
    remote.offer()
    reload(app)
    assert roles(app) == ["mine:1 default"]
    assert left_out(app).keys() == {CANARY, SHADOW}
    assert all("a signature is required here" in reason for reason in left_out(app).values())
    remote.sign("mine:2")
    reload(app)
    assert roles(app) == ROLLED_OUT


def test_a_bundle_that_is_loaded_is_not_replayed_unless_its_golden_prompts_were_off(
    app: App, remote: Remote
) -> None:
    counters, catalogue = app.engine.counters, app.state.catalogue

    def replayed() -> int:
        before = counters.prefills
        reload(app)
        return counters.prefills - before

    assert replayed() == 0
    remote.roll_out()
    assert replayed() == 4, "the golden prompts of mine:2, for each of its references"
    assert roles(app) == ROLLED_OUT
    assert (replayed(), roles(app)) == (0, ROLLED_OUT)
    catalogue.monitors["mine:1"].golden("off")
    assert app.client.get("/health/ready").status_code == 503
    assert replayed() == 2
    assert app.client.get("/health/ready").status_code == 200
    remote.publisher.set_alias("mine", "production", 2)
    assert replayed() == 0
    assert roles(app)[0] == "mine:2 default"
    assert app.client.post("/score", json={"prompt": "a"}).json()["bundle"]["version"] == 2


def test_without_an_answer_what_is_loaded_stays_and_it_is_said_since_when(
    app: App, remote: Remote
) -> None:
    remote.roll_out()
    reload(app)
    before = roles(app)
    since = status(app)["since"]
    failing = None
    assert before == ROLLED_OUT
    for kind, text in (
        (StoreUnreachable, ""),
        (StoreUnreachable, "mine/2/"),
        (StoreRefused, "mine/2/"),
    ):
        remote.down(kind, text)  # all of it, and that which may be left out where it is wrong
        assert "the network is down" in reload(app, 409).text
        assert (roles(app), status(app)["since"]) == (before, since)
        assert "the network is down" in status(app)["reload_error"]
        failing = failing or app.state.lifecycle.failing_since
        assert failing is not None
        assert app.state.lifecycle.failing_since == failing  # the first of them
        assert status(app)["reload_failing_since"] is not None
    remote.down(None, "")
    reload(app)
    assert (status(app)["reload_error"], status(app)["reload_failing_since"]) == (None, None)
    assert roles(app) == before


def test_a_pin_in_a_request_checks_and_does_not_search(app: App, remote: Remote) -> None:
    remote.sign("mine:2")
    remote.publisher.set_alias("mine", "canary", 2)
    reload(app)
    one, two = (remote.publisher.load(f"mine:{version}").manifest.digest for version in (1, 2))
    find = app.state.catalogue.scorer
    for reference, version in {
        f"mine@production@{one}": 1,
        f"mine@{one}": 1,
        f"{CANARY}@{two}": 2,
    }.items():
        assert find(reference, None).bundle.manifest.version == version
    for wrong in (f"mine@{two}", f"mine:1@{two}", f"{CANARY}@{one}", "mine:2@sha256:"):
        with pytest.raises(NotFound):
            find(wrong, None)


# the watch


class Watched:
    """``watch`` on a state that only counts: it reloads where it is told to, and fails where it is
    told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: str | None = None) -> None:
        self.reloads = 0
        self.problem = problem
        self.state = Service(dict)
        self.state.lifecycle.reload_error = problem
        self.state.lifecycle.load_again = lambda engine: {}
        self.state.catalogue.loaded = Loaded(
            (SimpleNamespace(bundle=SimpleNamespace(reference="a:1")),), {}
        )  # type: ignore[arg-type]
        monkeypatch.setattr(Lifecycle, "reload", lambda state, load, who: self._reload())
        monkeypatch.setattr(reloading, "print_line", lambda text: None)

    async def _reload(self) -> None:
        self.reloads += 1
        self.state.lifecycle.reload_error = self.problem
        if self.problem is not None:
            raise BundleNotFound(self.problem)

    def run(self, look: Callable[[], Stamps], before: Stamps) -> None:
        async def watching() -> None:
            watch(self.state, look, before, 0.0)
            await asyncio.gather(*reloading._tasks)

        asyncio.run(watching())


def test_the_watch_reloads_where_a_stamp_moved_and_says_a_failure_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch)
    answers, reloads = ["1", "1", "2", "2", None, None, "2"], list[int]()

    def look() -> Stamps:
        reloads.append(watched.reloads)
        if len(reloads) == 2:
            raise OSError("the folder went away")
        stamp = answers.pop(0)
        watched.problem = "no answer" if stamp is None else None
        watched.state.lifecycle.stopping = not answers
        return {"a": stamp}

    with caplog.at_level(logging.ERROR, "hallutracer"):
        watched.run(look, {"a": "0"})
    assert (reloads, watched.reloads) == ([0, 1, 1, 1, 2, 2, 3, 4], 5)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "not swapped" in line and "no answer" in line]) == 1
    assert "the store was not looked at" in lines


def test_the_watch_tries_again_where_the_last_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stamps are those that were seen before."""
    watched, looks = Watched(monkeypatch, "the golden prompts are off"), list[Stamps]()

    def look() -> Stamps:
        looks.append({"a": "1"})
        watched.state.lifecycle.stopping = len(looks) == 3
        return looks[0]

    watched.run(look, {"a": "1"})
    assert watched.reloads == 3


def test_a_store_that_hangs_does_not_hold_the_stop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the loop's end nor the process': the thread that waits is nobody's."""
    watched = Watched(monkeypatch)
    asked = threading.Event()
    hangs = threading.Event()

    def look() -> Stamps:
        asked.set()
        assert threading.current_thread().daemon
        hangs.wait(60)
        return {}

    async def watching() -> None:
        watch(watched.state, look, {}, 0.0)
        await asyncio.to_thread(asked.wait, 20)

    began = time.monotonic()
    asyncio.run(watching())
    assert time.monotonic() - began < 15
    hangs.set()


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_stamp_moves_with_the_alias_the_signature_and_the_bytes(
    kind: str, remote: Remote, tmp_path: Path
) -> None:
    if kind == "folder":
        publish_two(store := Store(tmp_path / "store"))
    else:
        store = remote.publisher
    keys = key_pair(tmp_path, "any")
    seen = [stamps(store, NAMES)]
    assert "has no alias canary" in (seen[0][CANARY] or "")
    assert stamps(store, NAMES) == seen[0]
    for change in (
        lambda: store.set_alias("mine", "canary", 1),
        lambda: store.set_alias("mine", "canary", 2),
        lambda: store.sign("mine:2", Signing(keys.private)),
        lambda: store.set_alias("mine", "production", 2),
    ):
        change()
        seen.append(stamps(store, NAMES))
        assert seen[-1] not in seen[:-1]
    if kind == "folder":
        (store.root / "mine" / "2" / "README.md").write_text("another")
        assert stamps(store, NAMES) != seen[-1]


def test_a_stamp_fetches_nothing_and_is_none_without_an_answer(remote: Remote) -> None:
    result = stamps(remote.reader, NAMES)
    assert result[DEFAULT] is not None
    assert not list(remote.reader.root.rglob("probes.safetensors"))
    remote.down(StoreUnreachable, "")
    assert stamps(remote.reader, NAMES) == dict.fromkeys(NAMES)
    remote.down(StoreRefused, "")
    assert "the network is down" in (stamps(remote.reader, NAMES)[DEFAULT] or "")


def test_the_canarys_key_is_the_operators_or_the_processs_own() -> None:
    own, other = (RolloutOptions(canary=CANARY).plan for _ in range(2))
    assert own.secret != other.secret
    assert len(own.secret) == 32
    assert (
        RolloutOptions(canary=CANARY, canary_key="shared-by-replicas").plan.secret
        == b"shared-by-replicas"
    )
    for guessable in ("", "short", "REPLACE-ME-with-a-secret"):
        with pytest.raises(UsageError, match="--canary-key: needs at least 16"):
            RolloutOptions(canary_key=guessable).plan  # noqa: B018
