"""vLLM's own server where a field of a request, or vLLM itself, renders a chat otherwise than
training's were."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from tokenizers import processors  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from probes_store.bundle import BundleDraft  # noqa: E402
from probes_store.manifest import ChatTemplateRecord, TokenizerRecord  # noqa: E402
from probes_store.store import Store  # noqa: E402
from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE  # noqa: E402
from service.demo import MODEL_DIR  # noqa: E402
from service.engines.checks import Tokens  # noqa: E402
from service.judging.guarantee import OTHER_RENDERING, TOOLS  # noqa: E402
from tests.kit.bundles import write_bundle  # noqa: E402
from tests.vllm_plugin import conftest  # noqa: E402
from tests.vllm_plugin.conftest import KNOWN, SURE, UNKNOWN, serving  # noqa: E402
from tests.vllm_plugin.test_gated import CHATS, documents, turn  # noqa: E402
from tests.vllm_plugin.test_rendering import CALL, TOOL  # noqa: E402

BATCH, ROUTES = f"{CHATS}/batch", (CHATS, RESPONSES_ROUTE, MESSAGES_ROUTE)
# As the demo's own, with what a request may say besides its messages in front.
TELLTALE = (
    "{% if documents %}{{ documents | tojson }}{% endif %}{% if enable_thinking is defined and not"
    " enable_thinking %}{{ 'Do not think.' }}{% endif %}{% if reasoning_effort == 'high' %}{{"
    " 'Think.' }}{% endif %}"
)
# What a request says besides -> its route and fields.
MOVES: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning_effort": (CHATS, {"reasoning_effort": "none"}),
    "another effort": (CHATS, {"reasoning_effort": "high"}),
    "documents": (CHATS, {"documents": [{"text": "Rome is a city."}]}),
    "of a batch": (BATCH, {"reasoning_effort": "none"}),
    "reasoning": (RESPONSES_ROUTE, {"reasoning": {"effort": "none"}}),
    "thinking": (MESSAGES_ROUTE, {"thinking": {"type": "disabled"}}),
}


def ask(url: str, route: str, asked: Any, policy: str = "gate", **fields: Any) -> httpx.Response:
    messages = turn(asked) if isinstance(asked, str) else asked
    fields = {"tokens": 12, "chosen": {"policy": policy, "bundle": SURE}} | fields
    return conftest.ask(url, route, [messages] if route == BATCH else messages, **fields)


def void(response: httpx.Response) -> list[str]:
    """What voids the guarantee, but for what other tests' requests to the same server may have made
    drift."""
    assert response.status_code == 200, response.text
    document = next(part for part in documents(response) if "hallutracer" in part)
    causes = document["hallutracer"]["guarantee"]["void"]
    return [cause for cause in causes if not cause.startswith(("drift: ", "outside: "))]


@pytest.mark.parametrize("what", MOVES)
def test_what_the_template_leaves_out_changes_nothing(url: str, what: str) -> None:
    route, fields = MOVES[what]
    for question, answered in ((KNOWN, True), (UNKNOWN, False)):
        response = ask(url, route, question, **fields)
        assert (void(response), "Rome" in response.text) == ([], answered)


@pytest.mark.parametrize("route", ROUTES)
def test_an_ordinary_chat_of_each_protocol_is_rendered_as_in_training(url: str, route: str) -> None:
    assert void(ask(url, route, KNOWN)) == []
    if route == CHATS:
        called = [
            *turn(KNOWN),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "Rome"},
        ]
        assert void(ask(url, route, called, tools=[TOOL], tool_choice="none"))[0] == TOOLS
        assert void(ask(url, route, called, name="x"))[0] == TOOLS
        assert OTHER_RENDERING not in void(ask(url, route, called))


# Conversations that ask in ways that no bundle is trained on, around a question that passes alone.
UNTRAINED: dict[str, list[dict[str, str]]] = {
    "two questions": turn(f"{KNOWN} And what is the capital of Spain?"),
    "two in one": turn("What are the capitals of Italy and Spain?"),
    "go on": [*turn(KNOWN), {"role": "assistant", "content": "I am not sure."}, *turn("ok, go on")],
    "yes": [*turn(KNOWN), {"role": "assistant", "content": "Shall I answer this?"}, *turn("Yes.")],
    "a second turn": [*turn(KNOWN), *turn("Hi")],
}


@pytest.mark.parametrize("how", UNTRAINED)
@pytest.mark.parametrize("route", ROUTES)
def test_a_conversation_that_asks_as_no_training_did_is_withheld(
    url: str, route: str, how: str
) -> None:
    alone = ask(url, route, KNOWN)
    assert "Rome" in alone.text
    response = ask(url, route, UNTRAINED[how])
    (row,) = next(part for part in documents(response) if "hallutracer" in part)["hallutracer"][
        "data"
    ]
    assert (row["outside_training"], row["decision"]) == (True, "abstain")
    assert any(cause.startswith("conversation: ") for cause in void(response))
    assert "Rome" not in response.text
    observed = ask(url, route, UNTRAINED[how], "observe")
    (row,) = next(part for part in documents(observed) if "hallutracer" in part)["hallutracer"][
        "data"
    ]
    assert (row["outside_training"], row["decision"]) == (True, "continue")


def test_an_answer_that_is_cut_or_ends_otherwise_voids_the_guarantee(url: str) -> None:
    cut = ask(url, CHATS, KNOWN, max_tokens=1)
    assert void(cut) == [
        "decoding: at most 1 tokens, where the calibration's answers had 12 or more"
    ]
    detection = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 3}
    (cause,) = void(ask(url, CHATS, KNOWN, repetition_detection=detection))
    assert "repetition_detection" in cause


@pytest.fixture(scope="module")
def telltale(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[str]:
    """A server of the demo model with a template that takes all that it is given, and a tokenizer
    that adds a BOS."""
    folder = tmp_path_factory.mktemp("telltale")
    shutil.copytree(MODEL_DIR, model := folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ '<s>' }}", "{{ '<s>' }}" + TELLTALE, 1
    )
    tokenizer.save_pretrained(model)
    tokens, sure = Tokens(AutoTokenizer.from_pretrained(model)), Store(store).load(SURE)
    assert (template := tokens.chat_template_digest) is not None
    manifest = dataclasses.replace(
        sure.manifest,
        tokenizer=TokenizerRecord(tokens.digest),
        chat_template=ChatTemplateRecord(template),
    )
    draft = BundleDraft(manifest, sure.probes, sure.golden, sure.evaluation(), "A test's.")
    write_bundle(draft, folder / "store" / SURE / "1")
    bundles = str(folder / "store")
    with serving(
        folder / "log", "--model", str(model), HALLUTRACER_BUNDLE=SURE, HALLUTRACER_STORE=bundles
    ) as address:
        yield address


@pytest.mark.long
@pytest.mark.parametrize("what", MOVES)
def test_what_the_template_writes_voids_the_guarantee_and_is_outside_training(
    telltale: str, what: str
) -> None:
    route, fields = MOVES[what]
    plain = ask(telltale, route, UNKNOWN, "observe")
    observed = ask(telltale, route, UNKNOWN, "observe", **fields)
    assert OTHER_RENDERING in void(observed)
    assert route == RESPONSES_ROUTE or OTHER_RENDERING not in void(plain)
    withheld = ask(telltale, route, UNKNOWN, **fields)
    assert OTHER_RENDERING in void(withheld)
    (row,) = withheld.json()["hallutracer"]["data"]
    assert (row["outside_training"], row["decision"]) == (True, "abstain")
    for asked in (KNOWN, "Hello!"):  # whatever the risk, and whether or not a fact is asked for
        (row,) = ask(telltale, route, asked, **fields).json()["hallutracer"]["data"]
        assert (row["outside_training"], row["decision"]) == (True, "abstain")


@pytest.mark.long
def test_the_bos_that_vllms_responses_add_is_another_rendering(telltale: str) -> None:
    for route in ROUTES:
        response = ask(telltale, route, KNOWN)
        assert (OTHER_RENDERING in void(response)) is (route == RESPONSES_ROUTE), route
        assert ("Rome" in response.text) is (route != RESPONSES_ROUTE), route
