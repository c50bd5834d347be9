"""The playground in a real browser: ask, gate, stream, fail, compare, by keyboard, on a phone, in
the dark."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from probes_store.bundle import Bundle
from service.errors import EngineError
from service.policies.guard import Action, Policy
from tests.api.test_reply import known
from tests.browser.chromium import Tab, faults, sideways, tab
from tests.kit.api import stream_events, two_parts
from tests.kit.bundles import write_bundle
from tests.matching import contextual_bundle, matching_draft
from tests.running import Running, running, until
from tests.scripted_engine import ScriptedEngine

QUESTION = "Is it so?"
RISKS, WRONG = [0.1, 0.2, 0.35, 0.4, 0.6, 0.7, 0.8, 0.9], [0, 0, 1, 0, 1, 0, 1, 1]
Open = Callable[..., AbstractContextManager[Tab]]

FORMS = {
    name: {
        "rows": rows,
        "wrong": wrong,
        "mean_risk": told,
        "calibration_error": 0.1,
        "auroc": auroc,
        "answered": 0.3,
        "wrong_among_answered": None,
    }
    for name, rows, wrong, told, auroc in (
        ("lone", 1200, 0.5, 0.51, 0.8),
        ("<b>turn_own</b>", 90, 0.9, 0.6, None),
    )
}


def counted(engine: ScriptedEngine, folder: Path) -> Bundle:
    """A bundle that keeps its training rows' risks."""
    draft = matching_draft(engine, "counted", 7)
    rows = {
        "risk": " ".join(f"{risk:.6f}" for risk in RISKS),
        "hallucinated": " ".join(map(str, WRONG)),
        "group": "0",
    }
    draft.evaluation = {"out_of_fold": {"risks": rows}}
    draft.evaluation["cross_validation"] = {"by_form": FORMS}
    return write_bundle(draft, folder / "counted")


@pytest.fixture(scope="module")
def shared(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that lets a request choose, with bundles of every kind: one, two, known,
    counted."""
    service = running(
        tmp_path_factory.mktemp("bundles"),
        add=[known, counted],
        policy="observe",
        policies=POLICIES,
    )
    with service as started:
        yield started


@pytest.fixture
def service(shared: Running) -> Iterator[Running]:
    """The same, its engine as it was."""
    yield shared
    engine = shared.engine
    engine.answer = "It is so."
    engine.fail = None
    engine.sleep_s = 0.0
    engine.__dict__.pop("wait", None)
    until(lambda: engine.counters.open_continuations == 0)


@pytest.fixture
def opened(browser: Browser, service: Running) -> Open:
    def open_(
        path: str = "/", url: str | None = None, **options: Any
    ) -> AbstractContextManager[Tab]:
        return tab(browser, url or service.url, **options)

    return open_


def ready(tab: Tab, *, details: bool = True) -> Page:
    page = tab.open()
    expect(page.locator("#ask")).to_be_enabled()
    expect(page.locator("#gate-body")).to_be_visible()
    if details:
        page.click("#choices > summary")
    return page


@pytest.fixture
def page(opened: Open) -> Iterator[Page]:
    with opened() as tab:
        yield ready(tab)


def ask(page: Page, question: str = QUESTION) -> None:
    page.fill("#question", question)
    page.click("#ask")


def finished(page: Page) -> None:
    expect(page.locator("#readings .reading").first).to_be_visible()
    expect(page.locator("#result")).to_have_attribute("aria-busy", "false")


def answered(page: Page) -> None:
    ask(page)
    finished(page)


def reply(service: Running, **body: Any) -> dict[str, Any]:
    (row,) = service.post(prompt=QUESTION, include=["trajectory", "running_mean"], **body).json()[
        "data"
    ]
    return dict(row)


def test_an_answer_that_may_continue(service: Running, page: Page) -> None:
    wanted = reply(service)
    answered(page)
    assert float(page.get_attribute(".risk", "data-risk") or "") == pytest.approx(wanted["risk"])
    expect(page.locator(".risk")).to_contain_text(f"{wanted['risk']:.2f}")
    expect(page.locator(".answer")).to_have_text("It is so.")
    assert "It is so." in page.inner_text("#announce")
    expect(page.locator(".facts").last).to_contain_text("9 answer tokens")
    page.click(".reading .layers > summary")
    dots = page.locator(".reading svg .dot title")
    assert dots.all_text_contents() == [
        f"layer {layer}: {value:.3f}" for layer, value in enumerate(wanted["trajectory"])
    ]
    heights = [
        float(dot.get_attribute("cy") or "") for dot in page.locator(".reading svg .dot").all()
    ]
    assert np.corrcoef(heights, wanted["trajectory"])[0, 1] == pytest.approx(-1)  # up is more
    running = re.findall(
        r"[\d.]+ ([\d.]+)", page.get_attribute(".reading svg .line.running", "d") or ""
    )
    assert np.corrcoef(np.array(running, float), wanted["running_mean"])[0, 1] == pytest.approx(
        -1, abs=1e-3
    )
    assert f"depth mean is {wanted['running_mean'][-1]:.3f}" in (
        page.get_attribute(".reading figure svg", "aria-label") or ""
    )
    means = service.bundles[0].probes.trajectory_mean
    page.click(".reading .layers details summary")
    cells = [row.split("\t") for row in page.inner_text(".reading tbody").splitlines()]
    assert np.array(cells, float)[:, 3:] == pytest.approx(
        means[::-1].T, abs=6e-4
    )  # factual, hallucinated
    for part in (".line.factual", ".line.hallucinated", ".band.factual", ".band.hallucinated"):
        box = page.locator(f".reading figure svg {part}").bounding_box()
        assert box is not None, part
        assert box["width"] > 100, part
        assert ".line" in part or box["height"] > 20, part


POLICIES = {
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care."),
    "send": Policy("send", Action.FALLBACK, 0.0),
}


def test_what_each_policy_does_with_a_flagged_prompt(service: Running, page: Page) -> None:
    steps = service.engine.counters.decode_steps
    page.locator("#threshold").press("Home")  # 0: everything is flagged
    for policy, decision, answer in (
        ("gate", "Withheld before the first token", "I am not sure."),
        ("send", "Left to another server before the first token", None),
        ("warn", "Answered although flagged: the policy warn warns", "It is so."),
        ("observe", "although flagged: the policy observe only watches", "It is so."),
        ("fetch", "Sent to fetch a passage before the first token", "Fetch a passage."),
    ):
        page.select_option("#policy", policy)
        answered(page)
        expect(page.locator(".decision")).to_contain_text(decision)
        if answer is not None:
            expect(page.locator(".answer")).to_have_text(answer)
        if policy == "gate":
            expect(page.locator(".facts").last).to_have_text("No answer token was decoded.")
            expect(page.locator("#history li")).to_contain_text("withheld (abstain)")
        if policy == "fetch":
            page.click("summary:has-text('Passage')")
            page.fill("#passage", "It is so, says the book.")
            answered(page)
            expect(page.locator(".decision")).to_have_text("Withheld before the first token")
            expect(
                page.locator(".facts", has_text="Without the passage the risk was")
            ).to_be_visible()
        if policy in ("gate", "send"):
            assert service.engine.counters.decode_steps == steps
        if policy == "warn":
            expect(page.locator(".facts.warn").first).to_have_text("Take care.")


def test_the_interval_and_what_lies_outside_training(service: Running, page: Page) -> None:
    wanted = reply(service, bundle="known")
    answered(page)
    expect(page.locator(".reading")).to_contain_text("records no interval")
    page.select_option("#bundle", "known:1")
    ask(page)
    expect(page.locator(".reading")).to_have_attribute("data-bundle", "known:1")
    finished(page)
    low, high = wanted["interval"]
    expect(page.locator(".facts").first).to_contain_text(f"between {low:.2f} and {high:.2f} (95 %)")
    expect(page.locator(".reading svg rect.interval")).to_have_count(1)
    outside = page.locator(".facts.warn")
    expect(outside).to_have_count(int(wanted["outside_training"]))


@pytest.mark.parametrize("own", ["observe", "gate", "all"])
def test_a_prompt_that_asks_for_no_fact(browser: Browser, tmp_path: Path, own: str) -> None:
    policies = {"all": Policy("all", Action.BLOCK, threshold=0.0, withhold_no_fact=True)}

    def asking(engine: ScriptedEngine, folder: Path) -> Bundle:
        return contextual_bundle(engine, folder, applies_from=0.999999)

    with running(tmp_path, names=(), add=[asking], policy=own, policies=policies) as service:
        wanted = reply(service)
        assert wanted["applies"] is False
        with tab(browser, service.url) as open_tab:
            page = ready(open_tab)
            answered(page)
            passes = "Asks for no fact: the risk does not apply"
            decided = "Blocked before the first token" if own == "all" else passes
            expect(page.locator(".decision")).to_have_text(decided)
            chance = f"The probability that it asks for one is {wanted['asks']:.2f}."
            expect(page.locator(".facts", has_text=passes)).to_contain_text(chance)
            if own != "all":
                expect(page.locator(".answer")).to_have_text("It is so.")
            # Read aloud is the decision, and after it the answer, where there is one.
            aloud = decided if own == "all" else "Answer: It is so."
            expect(page.locator("#announce")).to_contain_text(aloud)
            for value in ("0",) if own == "all" else ("0", "0.5", "1"):  # what a gate does
                page.locator("#threshold").fill(value)
                sentence = (
                    f"The last question, risk {wanted['risk']:.2f}, would be withheld."
                    if own == "all"
                    else f"The last question asks for no fact: its risk, {wanted['risk']:.2f},"
                    " does not apply, and no threshold withholds the answer."
                )
                expect(page.locator("#gate-here")).to_have_text(sentence)


@pytest.mark.parametrize("stops", [False, True])
def test_each_token_is_shaded_by_its_own_risk(
    browser: Browser, tmp_path: Path, stops: bool
) -> None:
    policies = {
        "watch": Policy("watch", Action.ABSTAIN, threshold=1.0, stop_at=1e-6 if stops else 1.0)
    }
    with running(tmp_path, names=(), add=[two_parts], policy="watch", policies=policies) as service:
        service.engine.answer = said = " It is \N{SNOWMAN}, so."
        body = {
            "prompt": QUESTION,
            "stream": True,
            "include": ["answer_risk"],
            "generate": {"max_tokens": 40},
        }
        _, *chunks, _ = stream_events(service.post(**body).text)
        sums = [
            0.0,
            *(
                one["answer_tokens"] * np.log(one["answer_risk"] / (1 - one["answer_risk"]))
                for one in chunks
                if "answer_risk" in one
            ),
        ]
        counts = [0, *(one["answer_tokens"] for one in chunks if "answer_risk" in one)]
        each = np.diff(sums) / np.maximum(1, np.diff(counts))
        wanted = [
            f"risk {1 / (1 + np.exp(-one)):.2f}"
            for one, more in zip(each, np.diff(counts), strict=True)
            if more
        ]
        with tab(browser, service.url) as open_tab:
            page = ready(open_tab)
            answered(page)
            shown = page.locator(".answer .token")
            given = said[:4] if stops else said
            expect(page.locator(".answer")).to_have_text(given.strip())
            titles = shown.evaluate_all("nodes => nodes.map((node) => node.title)")
            assert titles == wanted[1:]  # the first token is a space that is not shown
            assert len(titles) == (3 if stops else len(said) - 2), "the last token is not read"
            colours = shown.evaluate_all(
                "nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)"
            )
            depth = [float(colour.rpartition("/")[2].strip(" )")) for colour in colours]
            assert depth == pytest.approx(
                [0.6 * float(title.split()[1]) for title in titles], abs=0.004
            )
            assert len(set(titles)) > 1
            count = page.locator(".facts", has_text="answer tokens")
            expect(count).to_contain_text(
                "ended by the policy watch" if stops else f"{len(said.encode())} answer tokens"
            )
            expect(page.locator(".facts", has_text="Read again")).to_contain_text(
                "Each token is shaded by its own."
            )


class Slow:
    """The engine's ``wait`` that stands still before each letter until it is let go on, or fails
    then."""

    def __init__(self, after: int, error: Exception | None = None) -> None:
        self.after = after
        self.error = error
        self.seen = 0
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.seen += 1
        if self.seen > self.after:
            assert self.go_on.wait(30)
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("ends", ["whole", "stopped", "failed"])
def test_a_slow_answer_comes_piece_by_piece_and_keeps_what_was_said(
    service: Running, page: Page, ends: str
) -> None:
    slow = Slow(after=4, error=EngineError("the device is gone") if ends == "failed" else None)
    service.engine.wait = slow  # type: ignore[method-assign]
    ask(page)
    answer, problem = page.locator(".answer"), page.locator(".reading .problem")
    expect(answer).to_have_text("It i")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(page.locator("#ask")).to_be_disabled()
    expect(page.locator(".risk")).to_be_visible()  # long before the answer ends
    assert faults(page) == []
    if ends == "stopped":
        page.click("#stop")
        expect(problem).to_have_text("Stopped.")
        expect(page.locator("#stop")).to_be_hidden()
    slow.go_on.set()
    if ends == "failed":
        expect(problem).to_contain_text("the device is gone")
    finished(page)
    until(lambda: service.engine.counters.open_continuations == 0)
    expect(answer).to_have_text("It is so." if ends == "whole" else "It i")
    if ends == "whole":
        assert page.get_attribute(".answer", "aria-busy") is None
    expect(page.locator("#ask")).to_be_enabled()


def test_a_service_that_stopped(browser: Browser, tmp_path: Path) -> None:
    with (
        running(tmp_path) as service,
        tab(browser, service.url, allowed=("ERR_CONNECTION_REFUSED",)) as opened,
    ):
        page = ready(opened)
        page.fill("#question", QUESTION)
        service.server.should_exit = True
        until(lambda: closed(service))
        page.click("#ask")
        expect(page.locator(".problem:visible")).to_have_text(
            "The service did not answer. Is it still running?"
        )
        expect(page.locator("#ask")).to_be_enabled()
        assert faults(page) == []


def closed(service: Running) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", service.port)) != 0


def test_a_service_that_is_loading_is_asked_again(opened: Open) -> None:
    with opened(allowed=("503",)) as tab:
        error = {
            "message": "the model is loading",
            "type": "server_error",
            "param": None,
            "code": "not_ready",
        }
        loading = {
            "status": 503,
            "headers": {"retry-after": "1"},
            "body": json.dumps({"error": error}),
        }
        tab.page.route("**/v1/bundles", lambda route: route.fulfill(**loading), times=1)
        page = tab.open()
        expect(page.locator("#state")).to_have_text("Not ready yet: the model is loading")
        expect(page.locator("#ask")).to_be_disabled()
        expect(page.locator("#ask")).to_be_enabled()
        expect(page.locator("#state")).to_contain_text("scripted")


@pytest.mark.parametrize("rights", [["none"], []])
def test_a_choice_that_is_not_allowed_names_the_cure_and_on_this_machine_the_page_is_the_owners(
    browser: Browser, tmp_path: Path, rights: list[Any]
) -> None:
    service = running(tmp_path, callers_may=rights, threshold=0.0)
    with service as started, tab(browser, started.url, allowed=("403",)) as opened:
        page = ready(opened)
        page.select_option("#policy", "observe")
        ask(page)
        if rights:
            expect(page.locator(".reading .problem")).to_contain_text("--callers-may policy")
            expect(page.locator("#history li")).to_have_count(0)
        else:
            expect(page.locator(".answer:not([aria-busy])")).to_have_text("It is so.")


def test_keys(browser: Browser, tmp_path: Path) -> None:
    key = "a-key-of-sixteen-letters"
    with (
        running(tmp_path, api_keys=(key,)) as service,
        tab(browser, service.url, allowed=("401",)) as opened,
    ):
        page = opened.open()
        expect(page.locator("#key")).to_be_focused()
        expect(page.locator("#ask")).to_be_disabled()
        expect(page.locator("#key-problem")).to_be_hidden()
        assert faults(page) == []
        page.keyboard.type("another-key-of-mine")
        page.keyboard.press("Enter")
        expect(page.locator("#key-problem")).to_have_text("The service does not know this key.")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_be_enabled()
        expect(page.locator("#access")).to_be_hidden()
        answered(page)
        expect(page.locator(".risk")).to_be_visible()
        kept = (
            "JSON.stringify([localStorage, document.cookie, location.href,"
            " document.body.innerHTML])"
        )
        assert key not in page.evaluate(kept)
        page.reload()
        expect(page.locator("#ask")).to_be_enabled()
        page.click("#forget")
        expect(page.locator("#key")).to_be_focused()
        assert page.evaluate("sessionStorage.getItem('hallutracer.key')") is None


def test_the_slider_tells_what_the_bundle_counted(service: Running, page: Page) -> None:
    expect(page.locator("#gate-source")).to_contain_text("keeps too little")
    expect(page.locator("#gate-figure")).to_be_hidden()
    page.select_option("#bundle", "counted:1")
    expect(page.locator("#gate-source")).to_contain_text("Counted on")
    expect(page.locator("#threshold-value")).to_have_text("0.500 (the bundle's own)")
    expect(page.locator("#gate-at")).to_contain_text(
        "50 % of the questions are answered, 25 % of these answers are wrong"
    )
    expect(page.locator("#gate-cost")).to_contain_text("costs as much as 1 withheld right ones")
    marks = page.locator("#gate-plot circle.at")
    expect(marks).to_have_count(2)
    heights = {
        mark.get_attribute("class"): float(mark.get_attribute("cy") or 0) for mark in marks.all()
    }
    assert (
        heights["at answered"] < heights["at wrong"]
    )  # 50 % answered, 25 % of them wrong; y points down
    middle = marks.first.get_attribute("cx")
    slider = page.locator("#threshold")
    slider.focus()
    for _ in range(13):
        page.keyboard.press("ArrowLeft")
    assert float(marks.first.get_attribute("cx") or 0) < float(middle or 0)
    expect(page.locator("#gate-cost")).to_contain_text("costs as much as 1.7 withheld right ones")
    expect(page.locator("#threshold-value")).to_have_text("0.37")
    below = [wrong for risk, wrong in zip(RISKS, WRONG, strict=True) if risk < 0.37]
    text = (
        f"{round(100 * len(below) / 8)} % of the questions are answered,"
        f" {round(100 * sum(below) / len(below))} %"
    )
    expect(page.locator("#gate-at")).to_contain_text(text)
    expect(page.locator("#gate-at")).to_contain_text("50 % of the right answers are withheld")
    assert slider.get_attribute("aria-valuetext") == "0.37"
    assert page.is_checked("#threshold-send")
    with page.expect_request("**/score") as sent:
        ask(page)
    assert sent.value.post_data_json["threshold"] == 0.37
    finished(page)
    expect(page.locator(".facts").first).to_contain_text("Threshold 0.370")
    answers = reply(service, bundle="counted")["risk"] < 0.37
    expect(page.locator("#gate-here")).to_contain_text(
        "would be answered" if answers else "would be withheld"
    )
    page.click("#threshold-reset")
    expect(page.locator("#threshold-value")).to_contain_text("the bundle's own")
    with page.expect_request("**/score") as sent:
        ask(page)
    assert "threshold" not in sent.value.post_data_json


def test_the_table_by_form_of_conversation(opened: Open) -> None:
    with opened(width=360) as tab:
        page = ready(tab)
        expect(page.locator("#forms")).to_be_hidden()
        page.select_option("#bundle", "counted:1")
        page.click("#forms summary")
        expect(page.locator("#forms-source")).to_contain_text("training rows")
        cells = [
            row.locator("th, td").all_text_contents()
            for row in page.locator("#forms-rows tr").all()
        ]
        assert cells == [  # what is furthest from a probability first; names stay text
            ["<b>turn own</b>", "90", "0.90", "0.60", "–", "30 %", "–"],
            ["lone", "1,200", "0.50", "0.51", "0.80", "30 %", "–"],
        ]
        assert page.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )


def test_two_bundles_on_one_prompt(service: Running, page: Page) -> None:
    page.select_option("#compare", "two:1")
    answered(page)
    results = {
        reading.get_attribute("data-bundle"): float(
            reading.locator(".risk").get_attribute("data-risk") or ""
        )
        for reading in page.locator(".reading").all()
    }
    wanted = {name: reply(service, bundle=name)["risk"] for name in ("one:1", "two:1")}
    assert wanted["one:1"] != wanted["two:1"]
    assert results == pytest.approx(wanted)
    expect(page.locator(".reading .plot[data-drawn]")).to_have_count(2)
    expect(page.locator(".answer")).to_have_count(
        1
    )  # the first bundle's; of the other the risk was asked
    page.select_option("#bundle", "two:1")
    assert page.locator("#compare option").all_text_contents() == [
        "nothing",
        "one:1",
        "known:1",
        "counted:1",
    ]


def test_a_passage_stands_before_the_question(page: Page) -> None:
    with page.expect_request("**/score") as sent:  # one tap asks
        page.click("text=Dominica, with a passage")
    expect(page.locator("#passage")).to_have_value(
        "Roseau is the capital of Dominica. Castries is the capital of Saint Lucia. Lima is the"
        " capital of Peru."
    )
    prompt = sent.value.post_data_json["prompt"]
    assert prompt.split("\n\n") == [
        page.input_value("#passage"),
        "Which city is the capital of Dominica?",
    ]
    finished(page)
    page.click("#examples button >> nth=0")
    expect(page.locator("#passage")).to_have_value("")


def test_what_was_asked_stays_in_the_tab(page: Page) -> None:
    ask(page, "First?")
    finished(page)
    ask(page, "Second?")
    expect(page.locator("#history li")).to_have_count(2)
    page.reload()
    expect(page.locator("#ask")).to_be_enabled()
    assert "First?" in page.locator("#history li").nth(1).inner_text()
    page.locator("#history button").nth(1).click()
    expect(page.locator("#question")).to_have_value("First?")
    page.click("#clear")
    expect(page.locator("#history li")).to_have_count(0)
    page.reload()
    expect(page.locator("#past-empty")).to_be_visible()


def test_what_the_model_says_is_text(service: Running, page: Page) -> None:
    markup = "<img src=x onerror=alert(1)>"
    service.engine.answer = markup
    ask(page, markup)
    finished(page)
    expect(page.locator(".answer")).to_have_text(markup)
    expect(page.locator("#history li")).to_contain_text(markup)
    assert page.locator("main img").count() == 0


def test_the_policy_of_the_page_refuses_scripts_inside_it(opened: Open) -> None:
    with opened(allowed=("Content Security Policy", "Refused")) as tab:
        page = ready(tab)
        page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'taken over'";
            document.body.append(script);
        }""")
        with pytest.raises(Exception, match="fetch"):
            page.evaluate("fetch('http://127.0.0.1:9/')")
        assert page.title() == "HalluTracer playground"
        tab.elsewhere.clear()  # refused before it left


def test_by_keyboard_alone(opened: Open) -> None:
    with opened() as tab:
        page = ready(tab, details=False)
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        seen = [page.evaluate("document.activeElement.id")]
        if seen != ["question"]:  # the link moved the focus there already
            page.keyboard.press("Shift+Tab")
        expect(page.locator("#question")).to_be_focused()
        page.keyboard.type("Is it")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("so?")
        expect(page.locator("#question")).to_have_value("Is it\nso?")
        page.keyboard.press("Enter")
        finished(page)
        expect(page.locator(".answer")).to_have_text("It is so.")
        page.locator("#choices > summary").focus()
        page.keyboard.press("Enter")
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    "(document.activeElement.id || document.activeElement.tagName).toLowerCase()"
                )
            )
        wanted = {
            "bundle",
            "compare",
            "policy",
            "tokens",
            "ask",
            "threshold",
            "summary",
            "clear",
            "question",
        }
        assert wanted <= reached, wanted - reached


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_every_width_and_light(service: Running, opened: Open, width: int, scheme: str) -> None:
    with opened(width=width, scheme=scheme) as tab:
        page = ready(tab)
        assert sideways(page) == 0
        dark = (
            page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(244, 245, 247)"
        )
        assert dark is (scheme == "dark")
        assert faults(page) == []
        page.click("#passage-details summary")
        page.select_option("#compare", "known:1")
        page.select_option("#policy", "gate")
        ask(page, "o" * 300)
        finished(page)
        expect(page.locator(".risk")).to_have_count(2)
        for summary in page.locator(".reading summary").all():
            summary.click()
        assert sideways(page) == 0
        assert faults(page) == []
        if width == 360:
            assert page.evaluate(
                "document.getElementById('result').getBoundingClientRect().top < innerHeight"
            )
