"""bundle promote, rollback and diff, against a service that shadows the candidate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from probes_store.store import Store
from service.scoring import Scorer
from service.serving.rollout import RolloutPlan
from tests.command_line import hallutracer
from tests.matching import matching_draft
from tests.running import Running, running
from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two versions of ``mine`` that disagree, and a third with the second's probes and another threshold."""
    store, engine = Store(tmp_path / "store"), ScriptedEngine()
    for seed, threshold in ((0, 0.5), (1, 0.5), (0, 0.51)):
        store.publish(matching_draft(engine, "mine", seed, threshold=threshold))
    store.set_alias("mine", "production", 1)
    store.set_alias("mine", "canary", 3)
    return store


@pytest.fixture
def service(tmp_path: Path, store: Store) -> Iterator[Running]:
    """Judged by mine:1, shadowed by the others; has read 60 prompts."""
    with running(tmp_path / "service", names=("other",)) as service:
        service.state.catalogue.plan = RolloutPlan(shadows=("mine:2", "mine:3"))
        service.state.lifecycle.load_again = lambda engine: {
            f"mine:{version}": Scorer(engine, store.load(f"mine:{version}")) for version in (1, 2, 3)
        }
        httpx.post(f"{service.url}/v1/admin/reload").raise_for_status()
        service.post(prompt=[f"question {number}" for number in range(60)]).raise_for_status()
        yield service


def command(store: Store, *arguments: str) -> tuple[int, str]:
    done = hallutracer("bundle", *arguments, "--store", str(store.root))
    return done.returncode, done.stdout + done.stderr


def test_a_candidate_that_agrees_is_promoted_and_rolled_back(store: Store, service: Running) -> None:
    bounds = ("--service", service.url, "--least-prompts", "60", "--most-disagreement", "0.1")
    code, text = command(store, "promote", "mine@canary", *bounds)
    assert code == 0, text
    assert "mine@production -> mine:3" in text
    assert store.aliases("mine") == {"production": 3, "canary": 3, "previous": 1}
    code, text = command(store, "promote", "mine:3", *bounds)
    assert (code, "already" in text) == (0, True)
    assert store.aliases("mine")["previous"] == 1
    for expected in ({"production": 1, "previous": 3}, {"production": 3, "previous": 1}):
        assert command(store, "rollback", "mine")[0] == 0
        assert store.aliases("mine") == expected | {"canary": 3}


def test_a_rollback_names_the_aliases_that_keep_the_version_in_service(store: Store) -> None:
    assert command(store, "promote", "mine@canary", "--ungated")[0] == 0
    store.set_alias("mine", "eu", 1)
    code, text = command(store, "rollback", "mine")
    assert (code, "mine@production -> mine:1" in text) == (0, True)
    assert text.count("still") == 1
    assert "mine@canary is mine:3 still" in text
    assert "hallutracer bundle alias mine canary 1" in text
    assert "POST /v1/admin/reload" in text


@pytest.mark.parametrize(
    ("candidate", "bounds", "words"),
    [
        ("mine:2", ["--least-prompts", "60"], "FAIL  disagrees on"),
        (
            "mine:3",
            ["--least-prompts", "61", "--most-disagreement", "1"],
            "FAIL  60 prompts read as a shadow",
        ),
        ("mine:3", ["--least-prompts", "60", "--most-disagreement", "0.001"], "FAIL  disagrees on"),
    ],
)
def test_one_that_does_not_is_refused_and_nothing_changes(
    store: Store, service: Running, candidate: str, bounds: list[str], words: str
) -> None:
    before = store.aliases("mine")
    code, text = command(store, "promote", candidate, "--service", service.url, *bounds)
    assert code == 1
    assert words in text
    assert store.aliases("mine") == before


def test_what_the_service_has_not_seen_is_refused(store: Store, service: Running) -> None:
    store.publish(matching_draft(ScriptedEngine(), "mine", 7))
    code, text = command(store, "promote", "mine:4", "--service", service.url)
    assert (code, "has not loaded mine:4" in text) == (1, True)
    store.set_alias("mine", "production", 3)
    code, text = command(store, "promote", "mine:1", "--service", service.url)
    assert (code, "mine:1 is no shadow there" in text) == (1, True)
    code, text = command(store, "promote", "mine:2", "--service", "http://127.0.0.1:9")
    assert (code, "did not tell what it serves" in text) == (1, True)
    assert store.aliases("mine")["production"] == 3


def test_a_promotion_without_a_service_is_said_out_loud(store: Store) -> None:
    code, text = command(store, "promote", "mine:2")
    assert (code, "--ungated" in text) == (2, True)
    code, text = command(store, "promote", "mine", "--ungated")
    assert (code, "name a version or an alias" in text) == (2, True)
    assert command(store, "promote", "mine:2", "--ungated")[0] == 0
    assert store.aliases("mine")["production"] == 2


def test_there_must_be_something_to_go_back_to(store: Store) -> None:
    code, text = command(store, "rollback", "mine")
    assert (code, "nothing was promoted" in text) == (1, True)
    store.set_alias("mine", "previous", 1)
    code, text = command(store, "rollback", "mine")
    assert (code, "nothing to go back to" in text) == (1, True)


def test_what_differs(store: Store) -> None:
    code, text = command(store, "diff", "mine@production", "mine:3")
    assert code == 0
    assert "| threshold | 0.5 | 0.51 |" in text
    assert "classifier" not in text
    assert "0 of 4 layers read another head" in text
    assert command(store, "diff", "mine:1", "mine@production") == (0, "the same bundle\n")
