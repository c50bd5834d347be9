"""The list that the playground opens with: held-out questions, answered as the page loads and
sorted by risk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from probes_store.bundle import Bundle
from service.errors import EngineError
from service.judging.evaluation import RECOMMENDATION, Sample, SampleQuestion
from tests.browser.chromium import faults, sideways, tab
from tests.matching import matching_bundle
from tests.running import Running, running, service_of_module
from tests.scripted_engine import ScriptedEngine

QUESTIONS = tuple(
    SampleQuestion(
        f"Question <b>{number}</b> {'x' * number}?",
        ("so",) if number % 3 else ("not <i>that</i>",),
        "",
    )
    for number in range(30)
)
PAYS = "Use it for these kinds: <b>capitals</b>."
SAMPLE = Sample("rows.jsonl", "contains", r"(?i)not sure", 16, QUESTIONS)


def carrying(engine: ScriptedEngine, folder: Path) -> Bundle:
    evaluation = {"sample": SAMPLE.document(), RECOMMENDATION: {"sentence": PAYS}}
    return matching_bundle(engine, folder, "carrying", evaluation=evaluation)


def other(engine: ScriptedEngine, folder: Path) -> Bundle:
    return matching_bundle(engine, folder, "other")


service = service_of_module(names=(), add=[carrying, other], policy="observe")


@pytest.fixture
def page(service: Running, browser: Browser) -> Iterator[Page]:
    with tab(browser, service.url) as opened:
        page = opened.open()
        expect(page.locator("#sample-rows tr[data-number]")).to_have_count(24)
        yield page


LOADED = "performance.getEntriesByType('resource').map((one) => one.name)"


def rows(page: Page) -> list[dict[str, Any]]:
    results = []
    for row in page.locator("#sample-rows tr").all():
        cells = row.locator("td").all_inner_texts()
        number = row.get_attribute("data-number")
        results.append(
            {
                "number": number,
                "risk": float(cells[0]),
                "cells": cells,
                "kind": row.get_attribute("class"),
            }
        )
    return results


def test_the_questions_are_answered_and_sorted(service: Running, page: Page) -> None:
    assert faults(page) == []
    result = rows(page)
    assert [row["risk"] for row in result] == sorted(row["risk"] for row in result)
    answers = {row["number"]: row["cells"] for row in result if row["number"] is not None}
    assert set(answers) == {str(number) for number in range(24)}
    assert answers["1"][1].splitlines() == ["Question <b>1</b> x?", "It is so."]  # text, no markup
    assert answers["1"][2].strip() == "\u2713 right"
    assert answers["3"][2].split("\n")[0] == "\u2717 wrong"
    assert answers["3"][2].split("\n")[-1] == "not <i>that</i>"
    assert "24 questions" in page.inner_text("#sample-note")
    assert page.inner_text("#recommendation") == PAYS


def test_a_bundle_of_before_that_says_nothing_of_its_worth_shows_no_line(
    service: Running, page: Page
) -> None:
    page.click("#choices > summary")
    page.select_option("#bundle", "other:1")
    expect(page.locator("#recommendation")).to_be_hidden()


def test_the_line_tells_what_a_gate_there_would_do(service: Running, page: Page) -> None:
    threshold = service.bundles[0].manifest.threshold
    assert f"{threshold:.3f}" in page.inner_text("#threshold-value")
    for at in (None, 0.0, 0.4, 1.0):
        if at is not None:
            page.locator("#threshold").fill(str(at))
        result = rows(page)
        [place] = [place for place, row in enumerate(result) if row["kind"] == "line-row"]
        passed, stopped = result[:place], result[place + 1 :]
        value = threshold if at is None else at
        assert all(row["risk"] <= value + 0.005 for row in passed)
        assert all(row["risk"] >= value - 0.005 for row in stopped)
        wrong = sum("wrong" in row["cells"][2] for row in passed)
        stopped_wrong = sum("wrong" in row["cells"][2] for row in stopped)
        right = sum("right" in row["cells"][2] for row in stopped)
        left = (
            f"of the {len(passed)} that it lets through {wrong or 'none'}"
            f" {'are' if wrong > 1 else 'is'} wrong"
        )
        through = left if passed else "it lets none through"
        which = f": {stopped_wrong} wrong, {right} right" if stopped else ""
        assert (
            page.inner_text("#sample-text")
            == f"Without a gate {wrong + stopped_wrong} of 24 would be wrong. A gate at {value:.2f}"
            f" withholds {len(stopped) or 'none'}{which}; {through}."
        )


def test_under_a_policy_that_withholds_the_list_says_which_answers_are_not_known(
    browser: Browser, tmp_path: Path
) -> None:
    with (
        running(tmp_path, names=(), add=[carrying], policy="gate") as service,
        tab(browser, service.url) as opened,
    ):
        page = opened.open()
        expect(page.locator("#sample-rows tr[data-number]")).to_have_count(24)
        assert faults(page) == []
        threshold, found = service.bundles[0].manifest.threshold, rows(page)
        withheld = [
            row for row in found if row["number"] is not None and "(withheld)" in row["cells"][1]
        ]
        assert 0 < len(withheld) < 24
        assert all(row["risk"] >= threshold - 0.005 for row in withheld)
        assert all("not judged" in row["cells"][2] for row in withheld)
        said = (
            f"The service's policy withholds {len(withheld)} of the answers: whether they would be"
            " right is not known."
        )
        headline = page.inner_text("#sample-text")
        assert said in headline
        wrong = sum("wrong" in row["cells"][2] for row in found if row["number"] is not None)
        assert f"Without a gate at least {wrong} of 24 would be wrong." in headline
        assert f"{len(withheld)} not judged" in headline


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (
            [None, None],
            (
                "A gate at 0.50 withholds 1: 1 not judged; none that it lets through is judged. The"
                " service's "
            ),
        ),
        (
            ["right", None],
            "Of the 1 that are answered none is wrong. A gate at 0.50 withholds 1: 1 not judged; ",
        ),
        (
            ["wrong", None],
            (
                "Without a gate at least 1 of 2 would be wrong. A gate at 0.50 withholds 1: 1 not"
                " judged; "
            ),
        ),
        (
            ["right", "right"],
            (
                "Without a gate none of 2 would be wrong. A gate at 0.50 withholds 1: 0 wrong, 1"
                " right; "
            ),
        ),
    ],
)
def test_what_is_none_is_told_in_words(page: Page, verdicts: list[Any], message: str) -> None:
    told = [
        {"risk": risk, "verdict": verdict}
        for risk, verdict in zip((0.1, 0.9), verdicts, strict=True)
    ]
    (address,) = {one for one in page.evaluate(LOADED) if one.endswith("/sample.js")}
    headline = (
        "async ([from, rows, at, own]) => (await import(from)).headline(rows, rows.length, at, own)"
    )
    detail = {"signals": ["depth_mean"]}
    assert page.evaluate(headline, [address, told, 0.5, detail]).startswith(message)
    judged = sum(verdict is not None for verdict in verdicts)
    through = {0: "none that", 1: "of the 1 judged ones that", 2: "of the 2 that"}[judged]
    assert f"withholds none; {through} it lets through" in page.evaluate(
        headline, [address, told, 1.0, detail]
    )
    assert page.evaluate(headline, [address, [], 1.0, detail]) == ""
    assert "withholds 2: " in page.evaluate(headline, [address, told, 0.0, detail])
    assert "it lets none through." in page.evaluate(headline, [address, told, 0.0, detail])


def test_a_question_of_the_list_is_asked_by_one_tap(service: Running, page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    assert sideways(page) == 0
    page.click("#sample-rows tr[data-number='4'] button")
    expect(page.locator("#asked")).to_have_text(QUESTIONS[4].prompt)
    expect(page.locator(".answer:not([aria-busy])")).to_have_text("It is so.")


def test_the_keyboards_place_is_kept_while_the_list_is_drawn_anew(
    service: Running, page: Page
) -> None:
    page.locator("#sample-rows tr[data-number='7'] button").focus()
    page.evaluate("""() => { const line = document.getElementById("threshold");
        line.value = "0.9"; line.dispatchEvent(new Event("input")); }""")
    kept = page.evaluate("document.activeElement.closest('tr').dataset.number")
    assert kept == "7"


def test_another_bundle_without_questions_has_no_list(service: Running, page: Page) -> None:
    page.click("#choices > summary")
    page.select_option("#bundle", "other:1")
    expect(page.locator("#sample")).to_be_hidden()
    page.select_option("#bundle", "carrying:1")
    expect(page.locator("#sample-rows tr[data-number]")).to_have_count(24)


def test_a_failure_is_told_beside_what_came(browser: Browser, tmp_path: Path) -> None:
    few = dataclasses.replace(SAMPLE, questions=QUESTIONS[:1])

    def one(engine: ScriptedEngine, folder: Path) -> Bundle:
        return matching_bundle(engine, folder, "few", evaluation={"sample": few.document()})

    with running(tmp_path, names=(), add=[one]) as service:
        service.engine.fail = EngineError("the script broke")
        with tab(
            browser, service.url, allowed=("the server responded with a status of 5",)
        ) as opened:
            page = opened.open()
            expect(page.locator("#sample-problem")).to_contain_text(
                "Not all questions were answered: "
            )
