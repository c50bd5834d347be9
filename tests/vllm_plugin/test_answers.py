"""vLLM's own server reads answers as they are written: ``recheck`` holds them, ``stop_at`` ends
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.fleet import draft
from probes_store.store import Store
from service.demo import MODEL_DIR
from service.engines.base import EngineOptions, Sampling
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.policies.guard import OBSERVE
from service.scoring import RiskReport, Scorer
from service.turn import LEAST_READ
from tests.engines.vllm.installed import vllm_or_skip
from tests.matching import with_answer

vllm_or_skip()

from tests.api.protocols import in_anthropics_client, in_openais_client  # noqa: E402
from tests.vllm_plugin.conftest import MODEL, serving  # noqa: E402

pytestmark = pytest.mark.long

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
NAMES = "Italy", "Peru", "Japan", "Chad", "Mali", "France", "Egypt", "Brazil"
PROMPTS = [f"What is the capital of {name}?" for name in NAMES]
STOP, MESSAGE = 0.5, "I am not sure."
POLICIES = f"""
[again]
action = "abstain"
recheck = true
withhold_outside = false

[cut]
action = "abstain"
stop_at = {STOP}
withhold_outside = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def embedded(folder: Path) -> list[RiskReport]:
    """What the other engine says of each prompt; the store then has ``mine``."""
    engine = TransformersEngine.load(EngineOptions(model=str(MODEL_DIR), dtype="float32"))
    store = Store(folder / "store")
    store.publish(with_answer(draft("demo"), engine))
    scorer = Scorer(Scheduled(engine), store.load("mine"))
    prompts = [scorer.render(messages=[{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    return scorer.score_or_continue(prompts, Sampling(max_tokens=16), OBSERVE)


@pytest.fixture(scope="module")
def url(folder: Path, embedded: list[RiskReport]) -> Iterator[str]:
    (folder / "policies.toml").write_text(POLICIES)
    given = {
        "BUNDLE": "mine",
        "STORE": str(folder / "store"),
        "POLICIES": str(folder / "policies.toml"),
    }
    given |= {"CALLERS_MAY": "policy threshold"}
    with serving(
        folder / "log", **{f"HALLUTRACER_{name}": value for name, value in given.items()}
    ) as address:
        yield address


def ask(url: str, prompt: str, policy: str, *, text: bool = False, **more: Any) -> httpx.Response:
    chosen = {"hallutracer_policy": policy} | (
        {} if policy == "observe" else {"hallutracer_threshold": 1.0}
    )
    body = {"model": MODEL, "max_tokens": 16, "temperature": 0.0, "vllm_xargs": chosen, **more}
    body |= {"prompt": prompt} if text else {"messages": [{"role": "user", "content": prompt}]}
    return httpx.post(url + (TEXTS if text else CHATS), json=body, timeout=60)


def one(url: str, prompt: str, policy: str, **more: Any) -> dict[str, Any]:
    """A whole answer: its text, why it ended, what is said of it, and how many tokens are
    counted."""
    response = ask(url, prompt, policy, **more)
    assert response.status_code == 200, response.text
    found = response.json()
    [choice], [risk] = found["choices"], found["hallutracer"]["data"]
    said = choice["text"] if "text" in choice else choice["message"]["content"]
    return {
        "text": said,
        "why": choice["finish_reason"],
        **risk,
        "counted": found["usage"]["completion_tokens"],
    }


def streamed(url: str, prompt: str, policy: str, **more: Any) -> dict[str, Any]:
    response = ask(url, prompt, policy, stream=True, stream_options={"include_usage": True}, **more)
    parts = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ]
    choices = [choice for part in parts for choice in part["choices"]]
    said = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    ]
    risks = [part["hallutracer"] for part in parts if "hallutracer" in part]
    [first, *others] = [risk.get("data", [{}])[0] for risk in risks]
    assert not any(others), "a prompt's risk is told once"
    told = {name: risks[-1][name] for name in risks[-1] if name.startswith("answer_")}
    why = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(why) == 1
    return {
        "text": "".join(said),
        "why": why[0],
        **first,
        **told,
        "counted": parts[-1]["usage"]["completion_tokens"],
    }


@pytest.mark.parametrize("get", [one, streamed])
def test_an_answer_is_read_as_the_embedded_engine_reads_it(
    url: str, embedded: list[RiskReport], get: Any
) -> None:
    found = [get(url, prompt, "observe") for prompt in PROMPTS]
    assert [row["text"] for row in found] == [
        report.completion and report.completion.text for report in embedded
    ]
    answers = [report.answer for report in embedded if report.answer is not None]
    assert [row["answer_risk"] for row in found] == pytest.approx(
        [answer.risk for answer in answers], abs=1e-4
    )
    assert [row["answer_tokens"] for row in found] == [answer.tokens for answer in answers]
    assert [row["answer_flagged"] for row in found] == [answer.flagged for answer in answers]


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("get", [one, streamed])
def test_an_answer_that_its_own_tokens_flag_is_not_given(url: str, get: Any, text: bool) -> None:
    flagged = 0
    for prompt in PROMPTS:
        given, held = get(url, prompt, "observe", text=text), get(url, prompt, "again", text=text)
        assert held["answer_risk"] == pytest.approx(given["answer_risk"], abs=1e-5)
        if given["answer_flagged"]:
            assert (held["text"] or "", held["why"], held["decision"]) == (
                "",
                "content_filter",
                "abstain",
            )
            assert held["counted"] == 0
        else:
            assert {**held, "risk": 0} == {**given, "threshold": 1.0, "flagged": False, "risk": 0}
        flagged += given["answer_flagged"]
    assert 0 < flagged < len(PROMPTS), "else this tells nothing"


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("get", [one, streamed])
def test_an_answer_ends_where_its_running_risk_is_too_high(url: str, get: Any, text: bool) -> None:
    ended = 0
    for prompt in PROMPTS:
        more = {"text": text, "logprobs": 1 if text else True, "ignore_eos": True}
        given, cut = (get(url, prompt, policy, **more) for policy in ("observe", "cut"))
        if cut["why"] == "content_filter":
            assert cut["answer_risk"] >= STOP
            assert given["text"].startswith(cut["text"])
            assert len(cut["text"]) < len(given["text"]) or cut["counted"] < given["counted"]
            assert cut["counted"] <= cut["answer_tokens"], "nothing behind what was read"
            # Where vLLM merges outputs that wait, several tokens are read at once, and fewer than
            # these were shown.
            assert cut["answer_tokens"] >= LEAST_READ
            ended += 1
        else:
            assert (cut["text"], cut["why"], cut["counted"]) == (
                given["text"],
                given["why"],
                given["counted"],
            )
            assert cut["answer_tokens"] < LEAST_READ or cut["answer_risk"] < STOP
    assert ended


@pytest.mark.parametrize("stream", [False, True])
def test_the_newer_protocols_withhold_the_same_answers(url: str, stream: bool) -> None:
    chosen = {"hallutracer_policy": "again", "hallutracer_threshold": 1.0}
    ends = set[str]()
    for prompt in PROMPTS:
        chat = one(url, prompt, "again", max_tokens=40)
        text, withheld = chat["text"] or "", chat["decision"] == "abstain"
        said, refusal, why, tokens, note = in_openais_client(url, MODEL, prompt, stream, **chosen)
        assert (said, refusal, tokens) == (text, MESSAGE if withheld else None, chat["counted"])
        assert (why, note["data"][0]["decision"]) == (
            "content_filter" if withheld else None,
            chat["decision"],
        )
        said, reason, tokens, note = in_anthropics_client(url, MODEL, prompt, stream, **chosen)
        assert (said, reason) == (text or MESSAGE, "refusal" if withheld else "end_turn")
        assert (tokens, note["data"][0]["decision"]) == (chat["counted"], chat["decision"])
        ends.add(chat["why"])
    assert len(ends) > 1, "else this tells nothing"


@pytest.mark.parametrize("stream", [False, True])
def test_the_newer_protocols_keep_the_text_of_an_answer_that_was_ended(
    url: str, stream: bool
) -> None:
    """Where it ends depends on how many tokens came at once, as in a chat: what is shown may be
    fewer tokens than were read."""
    chosen = {"hallutracer_policy": "cut", "hallutracer_threshold": 1.0}
    for prompt in PROMPTS:
        whole = one(url, prompt, "observe", max_tokens=40)["text"]
        shown, refusal, why, tokens, note = in_openais_client(url, MODEL, prompt, stream, **chosen)
        assert (whole.startswith(shown), refusal) == (True, None)
        assert why == "content_filter" or shown == whole
        assert_ended_by_its_risk(why == "content_filter", tokens, note)
        shown, reason, tokens, note = in_anthropics_client(url, MODEL, prompt, stream, **chosen)
        assert whole.startswith(shown)
        assert reason == "refusal" or shown == whole
        assert_ended_by_its_risk(reason == "refusal", tokens, note)


def assert_ended_by_its_risk(was_ended: bool, tokens: int, note: dict[str, Any]) -> None:
    row = note["data"][0] | note
    assert tokens <= row["answer_tokens"]
    reaches = row["answer_tokens"] >= LEAST_READ and row["answer_risk"] >= STOP
    assert was_ended == reaches


@pytest.mark.parametrize("policy", ["again", "cut"])
def test_several_answers_to_a_prompt_are_refused(url: str, policy: str) -> None:
    response = ask(url, PROMPTS[0], policy, n=2, temperature=0.5)
    assert response.status_code == 400
    assert "leave 'n' out" in response.text
    assert ask(url, PROMPTS[0], "observe", n=2, temperature=0.5).status_code == 200


def test_each_of_several_prompts_has_its_own_answer(url: str) -> None:
    chosen = {"hallutracer_policy": "again", "hallutracer_threshold": 1.0}
    body = {
        "model": MODEL,
        "max_tokens": 16,
        "temperature": 0.0,
        "vllm_xargs": chosen,
        "prompt": PROMPTS,
    }
    found = httpx.post(url + TEXTS, json=body, timeout=60).json()
    alone = [one(url, prompt, "again", text=True) for prompt in PROMPTS]
    said = [(row["text"], row["finish_reason"]) for row in found["choices"]]
    assert said == [(row["text"], row["why"]) for row in alone]
    assert len({row["why"] for row in alone}) > 1, "else this tells nothing"
    risks = [row["answer_risk"] for row in found["hallutracer"]["data"]]
    assert risks == pytest.approx([row["answer_risk"] for row in alone], abs=1e-5)


def test_it_is_counted(url: str) -> None:
    def count(name: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"hallutracer_{name}")
        )

    names = "answers_stopped_total", "answers_flagged_total", "answer_risk_count"
    before = [count(name) for name in names]
    for policy in ("again", "cut"):
        for prompt in PROMPTS:
            one(url, prompt, policy)
    stopped, flagged, read = (count(name) - was for name, was in zip(names, before, strict=True))
    assert read == 2 * len(PROMPTS)
    assert 0 < stopped < read
    assert 0 < flagged < read
