"""What somebody sees who opens the playground for the first time: the field first, one slider, and
no contradiction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from probes_store.bundle import Bundle
from service.judging.evaluation import SampleQuestion
from tests.browser.chromium import faults, sideways, tab
from tests.browser.test_playground import QUESTION, Slow, ask, finished, ready, reply
from tests.browser.test_sample_list import SAMPLE
from tests.kit.bundles import write_bundle
from tests.matching import contextual_bundle, matching_bundle, matching_draft, with_context
from tests.running import Running, running, service_of_module
from tests.scripted_engine import ScriptedEngine

LAPTOP = {"width": 1366, "height": 850}
EXTREMES = ["0", "0.5", "1"]  # where the slider is put


def with_list(engine: ScriptedEngine, folder: Path) -> Bundle:
    return matching_bundle(engine, folder, "carrying", evaluation={"sample": SAMPLE.document()})


def with_forms(engine: ScriptedEngine, folder: Path) -> Bundle:
    """A bundle whose table of forms has names as long as the trainer's."""
    draft = matching_draft(engine, "forms", 3)
    form = {
        "wrong": 0.95,
        "mean_risk": 0.63,
        "calibration_error": 0.1,
        "auroc": 0.87,
        "answered": 0.45,
    }
    names = ("passage_contradicting", "conversation_refused_before")
    forms = {name: form | {"rows": 12_345, "wrong_among_answered": 0.9} for name in names}
    draft.evaluation = {"cross_validation": {"by_form": forms}}
    return write_bundle(draft, folder / "forms")


def far_away(engine: ScriptedEngine, folder: Path) -> Bundle:
    """A bundle to which every prompt lies outside training."""
    return contextual_bundle(engine, folder, applies_from=1e-9, reach=1e-6)


shared = service_of_module(names=(), add=[with_list, with_forms], policy="observe")


@pytest.fixture
def service(shared: Running) -> Iterator[Running]:
    yield shared
    shared.engine.__dict__.pop("wait", None)


@pytest.fixture
def page(service: Running, browser: Browser) -> Iterator[Page]:
    with tab(browser, service.url) as opened:
        opened.page.set_viewport_size(LAPTOP)
        page = ready(opened)
        expect(page.locator("#sample-rows tr[data-number]")).to_have_count(24)
        yield page


def top(page: Page, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["y"]


def test_the_field_to_ask_stands_before_the_list(page: Page) -> None:
    page.click("#choices > summary")  # closed, as the page opens
    assert top(page, "#question") < top(page, "#ask") < top(page, "#sample-rows") < LAPTOP["height"]


def test_one_slider_moves_the_line_of_the_list_and_the_gate(page: Page) -> None:
    assert page.locator("input[type=range]").count() == 1
    for value in EXTREMES:
        page.locator("#threshold").fill(value)
        expect(page.locator("#threshold-value")).to_have_text(f"{float(value):.2f}")
        expect(page.locator(".line-row td").first).to_have_text(f"{float(value):.2f}")
    page.click("#threshold-reset")
    expect(page.locator("#threshold-moved")).to_be_hidden()
    expect(page.locator("#threshold")).to_be_focused()


def test_a_bar_beside_each_risk_is_as_long_as_the_risk(page: Page) -> None:
    ask(page)
    finished(page)
    bars = page.locator(".bar").evaluate_all(
        "bars => bars.map((bar) => [Number(bar.dataset.risk),"
        " bar.lastChild.getBoundingClientRect().width / bar.getBoundingClientRect().width])"
    )
    assert len(bars) == 24 + 1  # the list's, and that of what was asked in this tab
    for risk, share in bars:
        assert share == pytest.approx(risk, abs=0.02)


@pytest.mark.parametrize("own", ["observe", "gate"])
def test_the_slider_says_of_a_prompt_outside_training_what_a_gate_does(
    browser: Browser, tmp_path: Path, own: str
) -> None:
    with running(tmp_path, names=(), add=[far_away], policy=own) as service:
        wanted = reply(service)
        assert (wanted["applies"], wanted["outside_training"]) == (True, True)
        gated = reply(service, policy="gate", threshold=1.0)
        assert gated["decision"] == "abstain"
        with tab(browser, service.url) as opened:
            page = ready(opened)
            ask(page)
            finished(page)
            page.locator("#threshold").fill("1")
            expect(page.locator("#gate-here")).to_have_text(
                "The last question is outside training: it would be withheld at every threshold."
            )


@pytest.mark.parametrize("kind", ["outside", "no_fact"])
def test_the_list_counts_what_a_gate_withholds_whatever_the_threshold(
    browser: Browser, tmp_path: Path, kind: str
) -> None:
    def carrying(engine: ScriptedEngine, folder: Path) -> Bundle:
        draft = matching_draft(engine, "listing", 0)
        few = replace(
            SAMPLE, questions=tuple(SampleQuestion(QUESTION, ("so",), "") for _ in range(4))
        )
        draft.evaluation = {"sample": few.document()}
        options = (
            {"reach": 1e-6, "applies_from": 1e-9}
            if kind == "outside"
            else {"applies_from": 0.999999}
        )
        return write_bundle(with_context(draft, engine, **options), folder / "listing")

    with (
        running(tmp_path, names=(), add=[carrying], policy="observe") as service,
        tab(browser, service.url) as opened,
    ):
        page = ready(opened)
        expect(page.locator("#sample-rows tr[data-number]")).to_have_count(4)
        page.locator("#threshold").fill("1" if kind == "outside" else "0")
        withheld, count = (4, "4") if kind == "outside" else (0, "none")
        expect(page.locator("#sample-text")).to_contain_text(f"withholds {count}")
        expect(page.locator("#sample-rows tr.stopped")).to_have_count(withheld)
        why = "outside training: withheld" if kind == "outside" else "asks for no fact: let through"
        assert set(page.locator("#sample-rows .why").all_inner_texts()) == {why}


def colour(page: Page, selector: str) -> str:
    return str(page.locator(selector).first.evaluate("node => getComputedStyle(node).color"))


def test_an_answer_that_is_flagged_and_passes_has_the_colour_of_wrong(page: Page) -> None:
    wrong, right = colour(page, "#sample td.wrong"), colour(page, "#sample td.right")
    assert wrong != right
    for threshold, wanted in (("0", wrong), ("1", right)):
        page.locator("#threshold").fill(threshold)
        ask(page)
        finished(page)
        assert colour(page, ".decision") == wanted
        border = page.locator(".answer").evaluate("node => getComputedStyle(node).borderLeftColor")
        assert border == wanted


@pytest.mark.parametrize("how", ["enter", "example", "list"])
def test_what_is_asked_while_an_answer_streams_is_asked_next(
    service: Running, page: Page, how: str
) -> None:
    slow = Slow(after=4)
    service.engine.wait = slow  # type: ignore[method-assign]
    ask(page, "First?")
    expect(page.locator(".answer")).to_have_text("It i")
    if how == "enter":
        page.fill("#question", "Second?")
        page.keyboard.press("Enter")
        second = "Second?"
    else:
        button = page.locator(
            {"example": "#examples button", "list": "#sample-rows button"}[how]
        ).first
        second = button.inner_text()
        button.click()
    expect(page.locator("#waiting")).to_have_text(f"Asked next, once this answer ends: {second}")
    page.fill("#question", "Typed meanwhile")
    expect(page.locator("#asked")).to_have_text("First?")
    slow.go_on.set()
    expect(page.locator("#asked")).to_have_text(second)
    finished(page)
    expect(page.locator("#waiting")).to_be_hidden()
    expect(page.locator("#history li")).to_have_count(2)
    expect(page.locator("#question")).to_have_value("Typed meanwhile")


def test_what_is_asked_before_the_service_is_ready_is_asked_then(
    service: Running, browser: Browser
) -> None:
    with tab(browser, service.url, allowed=("503",)) as opened:
        loading = {
            "status": 503,
            "headers": {"retry-after": "1"},
            "body": '{"error": {"message": "loading"}}',
        }
        held = True

        def refuse(route: Any) -> None:
            if held:
                route.fulfill(**loading)
            else:
                route.continue_()

        opened.page.route("**/v1/bundles", refuse)
        page = opened.open()
        expect(page.locator("#state")).to_contain_text("Not ready yet")
        page.fill("#question", "Is it ready?")
        page.keyboard.press("Enter")
        expect(page.locator("#waiting")).to_have_text(
            "Asked once the service is ready: Is it ready?"
        )
        held = False
        expect(page.locator("#asked")).to_have_text("Is it ready?")
        finished(page)
        opened.page.unroute("**/v1/bundles")


@pytest.mark.parametrize("part", ["question", "passage"])
@pytest.mark.parametrize(
    "long", ["o" * 380, "why " * 95, "x\n" * 190], ids=["word", "words", "lines"]
)
def test_a_long_question_or_passage_leaves_the_outcome_on_the_screen(
    page: Page, long: str, part: str
) -> None:
    if part == "passage":
        page.click("#passage-details summary")
        page.fill("#passage", long)
    ask(page, long if part == "question" else "Is it so?")
    finished(page)
    box = page.locator(".decision").bounding_box()
    assert box is not None
    assert 0 <= box["y"] <= box["y"] + box["height"] <= LAPTOP["height"]
    assert page.locator("#asked").evaluate("node => node.getBoundingClientRect().height") < 150
    assert page.locator("#history li").evaluate("node => node.getBoundingClientRect().height") < 150
    assert sideways(page) == 0
    assert faults(page) == []


def test_the_table_by_form_is_whole_on_a_laptop(page: Page) -> None:
    page.select_option("#bundle", "forms:1")
    page.click("#forms summary")
    cut = page.locator("#forms .scroll").evaluate("node => node.scrollWidth - node.clientWidth")
    assert cut == 0
