"""The scripts that measure the risk through a service, on made-up answers: tables, targets,
resumption, search."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks import adversaries, decoding, forms
from benchmarks.adversaries import QUERIES, freed, search
from benchmarks.forms import plan, targets, worth, worths
from benchmarks.running_service import Answers, Ask, Body, Job, Line, post, post_chat, together
from service.data.forms import chosen
from service.data.run_folder import AppendLog
from service.errors import RunMismatch
from tests.kit.local_server import answer, listening

ROWS = [
    {
        "id": f"q{number}",
        "prompt": f"What is thing {number}?",
        "answers": [f"A{number}"],
        "group": f"g{number // 2}",
    }
    for number in range(12)
]


def scored(risk: float, text: str | None = None, **more: Any) -> Line:
    flagged = risk >= 0.5
    return {
        "bundle": "sha256:a",
        "risk": risk,
        "threshold": 0.5,
        "flagged": flagged,
        "outside": False,
        "applies": None,
        "decision": "abstain" if flagged else "continue",
        "answer": text,
    } | more


def row(form: str, verdict: str, risk: float, group: str, **more: Any) -> Line:
    return scored(
        risk, "x", **{"form": form, "verdict": verdict, "group": group, "id": group, **more}
    )


def form_rows(
    form: str, wrong: int, right: int, risk_wrong: float, risk_right: float
) -> list[Line]:
    made = [row(form, "hallucinated", risk_wrong, f"w{number}") for number in range(wrong)]
    return made + [row(form, "factual", risk_right, f"r{number}") for number in range(right)]


class Fake:
    """Answers that ``ask`` makes, counted, and how often the service would have been started."""

    def __init__(self, ask: Ask) -> None:
        self.starts = 0
        self.asked = 0
        self._ask = ask

    def start(self) -> Ask:
        self.starts += 1
        return self._counted

    def _counted(self, body: Body) -> Line:
        self.asked += 1
        return self._ask(body)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AppendLog]:
    with closing(AppendLog(tmp_path / "record.jsonl")) as made:
        yield made


def measured(lines: list[Line], **options: bool) -> forms.Worth:
    result = worth(lines, **options)
    assert result is not None
    return result


def test_the_figures_of_a_form_by_hand_where_an_abstention_is_left_out_or_wrong() -> None:
    result = measured(
        [*form_rows("lone", 2, 2, 0.8, 0.3), row("lone", "abstained", 0.9, "z", outside=True)]
    )
    assert (result.rows, result.left_out, result.wrong, result.answered) == (4, 1, 0.5, 2)
    assert (result.risk, result.off, result.answered_off) == pytest.approx((0.55, 0.05, 0.3))
    assert (result.auroc, result.low, result.high, result.outside) == (1.0, 1.0, 1.0, 0.0)
    lines = [
        *form_rows("lone", 1, 1, 0.8, 0.3),
        row("lone", "abstained", 0.9, "z"),
        row("lone", "empty", 0.9, "y"),
    ]
    left_out, counted = measured(lines), measured(lines, abstained_wrong=True)
    assert (left_out.rows, left_out.wrong) == (2, 0.5)
    assert (counted.rows, counted.left_out, counted.wrong) == (4, 0, 0.75)
    assert worth([{"refused": "prompt_too_long", "form": "lone", "group": "g"}]) is None


def test_an_interval_counts_groups_and_not_rows() -> None:
    rng, alone = np.random.default_rng(0), np.arange(200)
    label, risk = rng.integers(0, 2, 200), rng.random(200)
    interval = forms.auroc_interval(label, risk, alone)
    assert None not in interval
    assert forms.auroc_interval(label, risk, np.repeat(np.arange(10), 20)) != interval
    copied = forms.auroc_interval(*(np.tile(one, 4) for one in (label, risk, alone)))
    assert copied == interval  # copies of the groups tell nothing new


def test_a_difference_is_held_against_chance_by_group_and_by_how_many_forms_there_are() -> None:
    rng, alone = np.random.default_rng(1), np.arange(400)
    risk = rng.uniform(0.2, 0.9, 400)
    z = [
        forms.difference_z((rng.random(400) > risk).astype(np.int64), risk, alone)
        for _ in range(300)
    ]
    assert 0.9 < float(np.std(np.array(z, np.float64))) < 1.1
    label = (rng.random(400) > risk - 0.1).astype(np.int64)
    apart, together_ = (forms.difference_z(label, risk, group) for group in (alone, alone // 40))
    assert apart is not None
    assert together_ is not None
    assert apart > 3.5 > together_ > 0
    certain = forms.difference_z(np.zeros(60, np.int64), np.full(60, 0.98), np.arange(60))
    assert certain is not None
    assert -2 < certain < 0, "sixty of sixty wrong is what .98 says"
    assert forms.difference_z(label, risk, np.zeros(400, np.int64)) is None
    assert forms.beyond_chance({"a": 2.1}) == {"a"}
    assert forms.beyond_chance({"a": 2.1, "b": 0.0, "c": -1.0}) == set()
    assert forms.beyond_chance({"a": 2.3, "b": -4.0, "c": 0.1}) == {"a", "b"}
    assert forms.beyond_chance({}) == set()


def test_each_target_names_the_forms_that_miss_it() -> None:
    lines = [
        *form_rows("lone", 30, 30, 0.75, 0.25),
        *form_rows("turns", 30, 30, 0.9, 0.4),  # (a): 0.65 for 0.5
        *form_rows("facts", 30, 30, 0.45, 0.46),  # (b) the wrong way round, (c) 0.455 for 0.5
        *form_rows("long", 60, 0, 0.98, 0.0),  # one class, none answered
    ]
    off, ranking, answered = targets(worths(lines))
    assert (off.passed, off.figure, off.note) == (
        False,
        "met by 3 of 4",
        "missed by turns +0.150 (z +2.9)",
    )
    assert (ranking.passed, ranking.figure) == (False, "met by 2 of 3")
    assert ranking.note.startswith("missed by facts -1.000; 1 not judged")
    assert (answered.passed, answered.figure) == (
        False,
        "met by 1 of 3",
    )  # lone and turns answer right ones only
    assert (
        answered.note
        == "missed by turns +0.400, lone +0.250; 1 not judged, fewer than 20 answered: long"
    )
    assert targets(worths(form_rows("lone", 30, 30, 0.8, 0.3)))[0].passed  # 0.55 for 0.5
    few = targets(worths(form_rows("turns", 5, 5, 0.8, 0.3)))
    assert [check.passed for check in few] == [True, None, None]  # no lone question, ten answered


def test_rows_are_asked_as_they_stand_and_told_by_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "Hello."}, {"role": "user", "content": "Who?"}]
    rows = [
        {
            "id": "a",
            "messages": chat,
            "answers": ["A"],
            "group": "g",
            "kind": "people",
            "form": "turns",
        },
        {"id": 2, "prompt": "Where?", "answers": ["B"], "kind": "places"},
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    first, second = forms.as_they_stand(path, "kind")
    assert (first.body["messages"], second.body["messages"]) == (
        chat,
        [{"role": "user", "content": "Where?"}],
    )
    assert (first.accepted, first.known) == (
        ["A"],
        {"form": "people", "group": "g", "kind": "people"},
    )
    assert (second.id, second.known) == ("2", {"form": "places", "group": 2, "kind": "places"})
    assert [job.known["form"] for job in forms.as_they_stand(path, "form")] == ["turns", "none"]
    # Each kind has equal risks: all that tells a right answer from a wrong one is the kind.
    lines = [one | {"kind": "people"} for one in form_rows("people", 3, 1, 0.8, 0.8)]
    lines += [one | {"kind": "places"} for one in form_rows("places", 1, 3, 0.3, 0.3)]
    result = measured(lines)
    assert (result.auroc, result.within) == (pytest.approx(0.75), 0.5)
    assert measured(form_rows("lone", 2, 2, 0.8, 0.3)).within is None


def test_a_killed_run_goes_on_and_a_whole_record_starts_nothing(tmp_path: Path) -> None:
    path, jobs = tmp_path / "record.jsonl", plan(ROWS, chosen(["lone"]), 10, 0)

    def run(fake: Fake, at_once: int = 3) -> list[Line]:
        with closing(AppendLog(path)) as log:
            return together(Answers(fake.start, log), jobs, "forms", at_once)

    def dies(body: Body) -> Line:
        if first.asked >= 4:
            raise RuntimeError("killed")
        return scored(0.2, "It is A3.")

    first, second = Fake(dies), Fake(lambda body: scored(0.2, "It is A3."))
    with pytest.raises(RuntimeError, match="killed"):
        run(first, 1)
    with path.open("a") as file:
        file.write('{"id": "torn')
    lines = run(second)
    assert (second.starts, second.asked) == (1, 7)
    assert [line["id"] for line in lines] == [job.id for job in jobs]
    assert sorted(line["verdict"] for line in lines) == ["factual"] + ["hallucinated"] * 9
    third = Fake(lambda body: scored(0.9))
    assert (run(third), third.starts) == (lines, 0)


def test_a_record_of_other_requests_or_of_another_bundle_is_refused(log: AppendLog) -> None:
    ask = Answers(Fake(lambda body: scored(0.2) | {"bundle": body["bundle"]}).start, log)
    ask(Job("one", {"prompt": "?", "bundle": "a"}))
    for name, body, why in (
        ("one", {"prompt": "!", "bundle": "a"}, "another request"),
        ("two", {"prompt": "?", "bundle": "b"}, "of bundle a, not of b"),
    ):
        with pytest.raises(RunMismatch, match=why):
            ask(Job(name, body))


def test_verdicts_are_trainings(log: AppendLog) -> None:
    said = iter(["It is A1.", "Something.", "I don\u2019t know.", " "])
    ask = Answers(Fake(lambda body: scored(0.2, next(said))).start, log)
    verdicts = [ask(Job(str(number), {}, ["A1"]))["verdict"] for number in range(4)]
    assert verdicts == ["factual", "hallucinated", "abstained", "empty"]


def test_a_refused_conversation_is_a_line_and_any_other_refusal_an_error() -> None:
    errors: dict[str, tuple[int, dict[str, str | None]]] = {
        "long": (413, {"code": "prompt_too_long", "param": "prompt"}),
        "odd": (422, {"code": "invalid_request", "param": "messages.1.content"}),
        "policy": (422, {"code": "invalid_request", "param": "policy"}),
        "busy": (429, {"code": "overloaded", "param": None}),
    }
    whole = {
        "risk": 0.25,
        "threshold": 0.5,
        "flagged": False,
        "decision": "continue",
        "applies": False,
        "outside_training": True,
        "completion": {"text": "Rome."},
    }

    def behave(request: BaseHTTPRequestHandler, body: bytes) -> None:
        name = json.loads(body)["prompt"]
        status, error = errors.get(name, (200, {}))
        content = {"error": error} if error else {"bundle": {"digest": "sha256:a"}, "data": [whole]}
        answer(request, status, json.dumps(content).encode())

    with (
        listening(behave, "HTTP/1.1") as address,
        httpx.Client(base_url=f"http://{address}") as client,
    ):
        expected = scored(0.25, "Rome.", outside=True, applies=False)
        assert post(client, {}, {"prompt": "fine"}) == expected
        assert post(client, {}, {"prompt": "long"}) == {"refused": "prompt_too_long"}
        assert post(client, {}, {"prompt": "odd"}) == {"refused": "invalid_request"}
        for name in ("policy", "busy"):
            with pytest.raises(RuntimeError, match=str(errors[name][1]["code"])):
                post(client, {}, {"prompt": name})


def test_a_chat_is_asked_under_a_policy_that_withholds_nothing() -> None:
    whole = {
        "risk": 0.25,
        "threshold": 0.5,
        "flagged": False,
        "decision": "continue",
        "outside_training": True,
        "applies": False,
        "decoding": "sampled",
    }
    asked: list[tuple[str, Body]] = []

    def behave(request: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append((request.path, json.loads(body)))
        status = 413 if asked[-1][1]["messages"] == "long" else 200
        note = {"bundle": {"digest": "sha256:a"}, "data": [whole]}
        reply = {"choices": [{"message": {"content": "Rome."}}], "hallutracer": note}
        error = {"error": {"code": "context_length_exceeded", "param": "messages"}}
        answer(request, status, json.dumps(reply if status == 200 else error).encode())

    with (
        listening(behave, "HTTP/1.1") as address,
        httpx.Client(base_url=f"http://{address}") as client,
    ):
        line = post_chat(client, "m", "mine", {"messages": "short", "temperature": 0.7})
        assert line == scored(0.25, "Rome.", outside=True, applies=False, departs="sampled")
        assert post_chat(client, "m", None, {"messages": "long"}) == {
            "refused": "context_length_exceeded"
        }
    observing = {"hallutracer_policy": "observe"}
    assert [body["vllm_xargs"] for _, body in asked] == [
        observing | {"hallutracer_bundle": "mine"},
        observing,
    ]
    assert asked[0][0] == "/v1/chat/completions"
    assert asked[0][1]["temperature"] == 0.7


def words(body: Body) -> str:
    return str(body["messages"][-1]["content"])


def searched(risk_of: Callable[[str], float]) -> list[Line]:
    return search(
        lambda job: job.known | scored(risk_of(words(job.body)), "It is A0."),
        (ROWS[0], 0.9),
        "gate",
        0,
    )


def test_the_search_keeps_and_extends_what_lowers_the_risk() -> None:
    *before, last = lines = searched(lambda text: 0.9 - 0.1 * text.count("an"))
    assert [line["decision"] == "continue" for line in lines] == [False] * len(before) + [True]
    kept, lowest = "", 0.9
    for line in lines:
        assert line["suffix"].startswith(kept)
        if line["risk"] < lowest:
            lowest, kept = line["risk"], line["suffix"]
    assert kept.count("an") >= 5
    lines = searched(lambda text: 0.9)  # nothing is found: it ends
    assert len(lines) == QUERIES
    assert len({line["suffix"] for line in lines}) > 10
    assert "freed nothing" in adversaries.searching(lines)


def way(name: str, question: str, risk: float, verdict: str = "hallucinated", **more: Any) -> Line:
    return scored(risk, "x", way=name, question=question, verdict=verdict, **more)


def test_of_several_lines_of_a_question_the_lowest_risk_counts() -> None:
    result = freed(
        [
            way("...", "a", 0.4, "factual"),
            way("junk", "a", 0.3, outside=True),
            way("...", "b", 0.2, "factual"),
            way("...", "c", 0.9),
            way("junk", "d", 0.1, "abstained"),
            {"question": "e", "refused": "invalid_request"},
        ]
    )
    assert (result.tried, result.free, result.right, result.wrong, result.outside) == (
        4,
        3,
        1,
        1,
        1,
    )
    assert result.share.startswith("0.75 [")


def test_questions_of_several_files_are_taken_in_turn_and_one_of_each_group(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("facts.jsonl", "trivia.jsonl")]
    shared = {"id": "t0", "prompt": "What is thing 0, again?", "answers": ["A0"], "group": "g0"}
    others = [
        {"id": f"t{number}", "prompt": "Why?", "answers": ["x"], "group": f"t{number}"}
        for number in (1, 2)
    ]
    for path, rows in zip(paths, (ROWS, [shared, *others]), strict=True):
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    chosen_rows = decoding.one_of_each_group(paths, 6, seed=0)
    groups = [row["group"] for row in chosen_rows]
    assert len(set(groups)) == len(groups) == 6
    assert {"t1", "t2"} < set(groups), "the files are taken in turn"
    assert decoding.one_of_each_group(paths, 6, seed=0) == chosen_rows
    assert len(decoding.one_of_each_group(paths, 100, seed=0)) == 8, (
        "6 groups of one file, 2 more of the other"
    )


def test_each_way_of_decoding_is_asked_as_often_as_it_can_differ() -> None:
    jobs = decoding.jobs_of(ROWS[:2], 4)
    named = [
        (job.known["way"], job.body.get("temperature"), job.body["seed"])
        for job in jobs
        if job.id[:2] == "q0"
    ]
    assert named == [
        ("temperature 0", 0.0, 0),
        *(("none named", None, draw) for draw in range(4)),
        *((f"temperature {t:g}", t, draw) for t in (0.7, 1.0) for draw in range(4)),
    ]
    assert len({job.id for job in jobs}) == len(jobs) == 26
    assert {job.body["max_tokens"] for job in jobs} == {24}
    assert "temperature" not in jobs[2].body, "a temperature of null could be read otherwise"


def decoded(way: str, verdict: str, risk: float, group: str, departs: str | None = None) -> Line:
    return row("lone", verdict, risk, group, way=way, departs=departs)


def test_what_was_told_stands_beside_what_was_wrong_by_way_of_decoding() -> None:
    lines = [
        *(decoded("none named", "factual", 0.2, f"r{number}") for number in range(10)),
        *(decoded("none named", "hallucinated", 0.6, f"w{number}") for number in range(10)),
        decoded("none named", "abstained", 0.9, "z"),
        {"way": "none named", "group": "y", "refused": "prompt_too_long"},
        *(
            decoded("temperature 1", "hallucinated", 0.2, f"r{number}", "sampled")
            for number in range(10)
        ),
    ]
    text = decoding.differences(lines)
    assert "temperature 0.7" not in text, "nobody asked so"
    assert text.splitlines()[2].split(" | ")[1:6] == ["20", "2", "0.400", "0.500", "-0.100"]
    assert text.splitlines()[2].endswith("| 10 | 0.000 | 0.200 | 0 |")
    assert text.splitlines()[3].endswith("| 10 | 1.000 | 0.200 | 10 |")
    result = decoding.target(lines)
    assert (result.passed, result.figure) == (False, "0.100")
    assert (
        decoding.target([line for line in lines if line["way"] == "temperature 1"]).passed is None
    )
    met = [
        decoded("none named", "factual", 0.2, "a"),
        decoded("none named", "hallucinated", 0.76, "b"),
    ]
    assert decoding.target(met).passed
    once = [*lines[:20]]
    drawn = [line for line in once for _ in range(4)]
    assert decoding._z(drawn) == decoding._z(once), "draws of a question are no further rows"
