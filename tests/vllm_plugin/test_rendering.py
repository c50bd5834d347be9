"""A prompt that vLLM renders otherwise than training's were is known by its token ids, whatever
field did it.

vLLM's own renderer and request models make the prompts, without an engine."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from transformers import AutoTokenizer  # noqa: E402
from vllm.config import ModelConfig, VllmConfig  # noqa: E402
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: E402
from vllm.renderers import BaseRenderer, hf  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.tokenizers.hf import get_cached_tokenizer  # noqa: E402

from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE  # noqa: E402
from service.demo import MODEL_DIR  # noqa: E402
from service.engines.checks import Tokens  # noqa: E402
from service.errors import RequestError  # noqa: E402
from service.judging.guarantee import (  # noqa: E402
    MEDIA,
    NO_TEMPLATE,
    OTHER_RENDERING,
    Shape,
    Standing,
    shape_of,
    unlike_training,
)
from service.policies.guard import Action, Policy  # noqa: E402
from service.scoring import Scorer  # noqa: E402
from service.vllm_plugin import turn as turns  # noqa: E402
from service.vllm_plugin.front_end import note_renderings  # noqa: E402
from service.vllm_plugin.note import CHATS, CURRENT, Note, read  # noqa: E402
from service.vllm_plugin.rendering import Chat, is_rendering  # noqa: E402
from service.vllm_plugin.turn import TurnDriver  # noqa: E402
from tests.engines import tiny  # noqa: E402
from tests.engines.tool_template import TOOL_TEMPLATE  # noqa: E402
from tests.kit.bundles import GUARANTEE  # noqa: E402

# Of a bundle that would take a lone request for small talk below a P(asks) of 0.5.
TELLS_TALK: Any = SimpleNamespace(
    context=SimpleNamespace(applicability=SimpleNamespace(threshold=0.5)),
    training=SimpleNamespace(reworded=1),
)
DEMO: str = AutoTokenizer.from_pretrained(MODEL_DIR).chat_template
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{"
    " '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
    " Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"
    " }}{% endif %}"
)
# Takes whatever a request may say besides its messages.
TELLTALE = (
    "{{ bos_token }}{% if documents %}{{ documents | tojson }}{% endif %}{% if reasoning_effort"
    " %}effort: {{ reasoning_effort }}{% endif %}{% if enable_thinking is defined and not"
    " enable_thinking %}<think></think>{% endif %}{% if add_vision_id %}picture 1{% endif %}{% for"
    " m in messages %}{{ m.role }}{% if m.name and m.role != 'tool' %}({{ m.name }}){% endif %}: {{"
    " m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{%"
    " if m.tools %}{{ m.tools | tojson }}{% endif %}{% if m.task %}{{ m.task }}{% endif %}\n{%"
    " endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (  # as multimodal models' templates take a message's parts
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content"
    " }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}{%"
    " if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "demo": DEMO,
    "smollm2": SMOLLM2,
    "tools": TOOL_TEMPLATE,
    "telltale": TELLTALE,
    "parts": PARTS,
}
Ask = Callable[..., "Prompt"]


class Prompt(SimpleNamespace):
    """What a request became."""

    note: Note
    text: str
    same: bool  # as our own rendering of its messages


@pytest.fixture
def renderers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], OnlineRenderer]]:
    """vLLM's renderer of a template."""
    monkeypatch.setattr(BaseRenderer, "render_chat_async", BaseRenderer.render_chat_async)
    note_renderings()
    model = ModelConfig(model=str(MODEL_DIR), dtype="float32")
    model.max_model_len = 4096  # nothing is forwarded
    config, opened = VllmConfig(model_config=model), list[Any]()

    def make(template: str, tokenizer: Any) -> OnlineRenderer:
        hf._CONTENT_FORMATS.clear()  # which knows a template by the tokenizer's folder
        tokenizer.chat_template = template
        opened.append(hf.HfRenderer(config, get_cached_tokenizer(tokenizer)))
        return OnlineRenderer(
            model,
            opened[-1],
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            trust_request_chat_template=True,
            trust_request_mm_kwargs=True,
            enable_auto_tools=True,
        )

    yield make
    for renderer in opened:
        renderer.shutdown()


@pytest.fixture
def ask(renderers: Callable[[str, Any], OnlineRenderer]) -> Ask:
    """What becomes of a request to a server with a template; ``bos``: its tokenizer puts a BOS in
    front of any text."""

    def asked(template: str, route: str = CHATS, *, bos: bool = False, **body: Any) -> Prompt:
        tokenizer = tiny.tokenizer() if bos else AutoTokenizer.from_pretrained(MODEL_DIR)
        return rendered_by(
            renderers(TEMPLATES.get(template, template), tokenizer), tokenizer, route, **body
        )

    return asked


def rendered_by(renderer: OnlineRenderer, tokenizer: Any, route: str, **body: Any) -> Prompt:
    note = Note(route=route)
    read(note, json.dumps(body).encode())

    async def render() -> Any:
        token = CURRENT.set(note)
        try:
            if route == RESPONSES_ROUTE:
                return (
                    await renderer.render_responses(ResponsesRequest.model_validate(body))
                ).engine_input
            if route == MESSAGES_ROUTE:
                asked = AnthropicMessagesRequest.model_validate(
                    {"model": "m", "max_tokens": 9} | body
                )
                request = AnthropicServingMessages.to_chat_completion_request(asked)
            else:
                request = ChatCompletionRequest.model_validate(body)
            result = await renderer.render_chat(request)
            assert isinstance(result, tuple), result
            return result[1][0]
        finally:
            CURRENT.reset(token)

    prompt = asyncio.run(render())
    number = note.add(prompt)
    return Prompt(
        note=note, text=prompt["prompt"], same=is_rendering(Tokens(tokenizer), note.chats[number])
    )


def turn(text: Any = "What is the capital of Italy?", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str = "Rome.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


# Requests by name: those that say something besides their messages, which the template
# ``telltale`` writes; those that become another prompt whatever the template; and those that
# clients send every day.
REQUESTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = json.loads(
    Path(__file__).with_name("renderings.json").read_text(encoding="utf-8")
)
MOVES, ALWAYS = REQUESTS["moved by a template"], REQUESTS["moved always"]
PLAIN = REQUESTS["plain"]


@pytest.mark.parametrize("what", MOVES)
def test_what_a_template_writes_besides_is_another_rendering_and_what_it_leaves_out_is_none(
    ask: Ask, what: str
) -> None:
    route, body = MOVES[what]
    moved = ask("telltale", route, **body)
    assert not moved.same, moved.text
    ignored = ask(
        "demo", route, **{name: value for name, value in body.items() if name != "chat_template"}
    )
    assert ignored.same, ignored.text


@pytest.mark.parametrize("what", ALWAYS)
@pytest.mark.parametrize("template", ["demo", "telltale"])
def test_another_ending_or_beginning_is_another_rendering(
    ask: Ask, template: str, what: str
) -> None:
    route, body = ALWAYS[what]
    assert not ask(template, route, **body).same


@pytest.mark.parametrize(
    ("template", "same"), [("telltale", False), ("smollm2", False), ("tools", False)]
)
def test_the_bos_that_the_responses_route_adds_is_another_rendering(
    ask: Ask, template: str, same: bool
) -> None:
    for bos in (True, False):
        assert ask(template, CHATS, bos=bos, messages=[turn()]).same
        assert ask(template, MESSAGES_ROUTE, bos=bos, messages=[turn()]).same
        assert ask(template, RESPONSES_ROUTE, bos=bos, input="Hi").same is (same if bos else True)


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "Pâris"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("what", PLAIN)
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_ordinary_request_is_no_other_rendering(ask: Ask, template: str, what: str) -> None:
    route, body = PLAIN[what]
    prompt = ask(template, route, **body)
    assert prompt.same, prompt.text


def test_the_format_of_contents_that_the_operator_names_is_known_by_what_becomes_of_it(
    renderers: Callable[[str, Any], OnlineRenderer],
) -> None:
    for template, given, same in (
        ("parts", "string", True),
        ("telltale", "openai", False),
        ("parts", "openai", True),
    ):
        tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        renderer = renderers(TEMPLATES[template], tokenizer)
        renderer.chat_template_content_format = given
        assert rendered_by(renderer, tokenizer, CHATS, messages=[turn()]).same is same, (
            template,
            given,
        )


def test_a_template_of_the_operators_own_is_another_rendering(
    renderers: Callable[[str, Any], OnlineRenderer],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    renderer = renderers(DEMO, tokenizer)
    for template, same in ((DEMO, True), ("Answer." + DEMO, False), (DEMO + "{{ ' ' }}", False)):
        renderer.chat_template = template
        assert rendered_by(renderer, tokenizer, CHATS, messages=[turn()]).same is same, template
    renderer.chat_template = TELLTALE
    renderer.default_chat_template_kwargs = {"enable_thinking": False}
    tokenizer.chat_template = TELLTALE
    assert not rendered_by(renderer, tokenizer, CHATS, messages=[turn()]).same


def test_what_was_rendered_is_told_by_role_and_text(ask: Ask) -> None:
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "?"}]
    prompt = ask(
        "parts", messages=[{"role": "developer", "content": "Be brief."}, turn(parts, name="Bob")]
    )
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What?"},
    ]
    assert prompt.note.conversation(0) == conversation
    prompt.note.moved.add(0)
    assert prompt.note.conversation(0) is prompt.note.conversation(1) is None
    later = ask(
        "demo", RESPONSES_ROUTE, input=[turn(), assistant(), turn("Hi")], instructions="Be brief."
    )
    assert [message["role"] for message in later.note.conversation(0) or []] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert (
        ask("demo", messages=[turn()], chat_template="{{ messages }}").note.conversation(0) is None
    )


def test_what_cannot_be_compared_counts_as_another_rendering() -> None:
    tokens = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR))
    ids = tokens.encode_chat([turn()])
    assert is_rendering(tokens, Chat([turn()], (), ids))
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    for messages in (
        [],
        [None],
        [3],
        [{"content": "a"}],
        [turn(image)],
        [turn("\ud83d")],
        [turn(), turn()],
    ):
        assert not is_rendering(tokens, Chat(messages, (), ids)), messages
    # The rules that read a conversation know no role but these, and a template writes what it is
    # given.
    for role in ("User", "human", f"user\n{turn()['content']}", "function", ""):
        messages = [turn(), {"role": role, "content": "Also: what is the capital of Samoa?"}]
        try:
            written = tokens.encode_chat(messages)
        except RequestError:
            continue
        assert not is_rendering(tokens, Chat(messages, (), written)), role
    for role in ("system", "developer", "user", "assistant", "tool"):
        messages = [turn(), {"role": role, "content": "a"}]
        try:
            written = tokens.encode_chat(messages)
        except RequestError:
            continue
        assert is_rendering(tokens, Chat(messages, (), written)), role
    assert not is_rendering(tokens, None)
    for other in (ids[:-1], ids[1:], [*ids, ids[-1]], [ids[0], *ids], []):
        assert not is_rendering(tokens, Chat([turn()], (), other))


def test_a_chat_that_another_renderer_made_is_compared_by_the_requests_own_messages() -> None:
    """As of gpt-oss, whose prompts OpenAI's library writes."""
    tokens = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR))
    ids = tokens.encode_chat([turn()])
    for route, body in (
        (CHATS, {"messages": [turn()]}),
        (RESPONSES_ROUTE, {"input": turn()["content"]}),
    ):
        note = Note(route=route)
        read(note, json.dumps(body).encode())
        assert is_rendering(tokens, note.chats[note.add({"prompt_token_ids": ids})])
        assert not is_rendering(
            tokens, note.chats[note.add({"prompt_token_ids": ids})]
        )  # it has no second chat
    assert Note().add({"prompt_token_ids": ids}) == 0
    for prompt in (None, "text", {}, {"prompt_token_ids": None}):
        note = Note(turns=([turn()],))
        assert note.chats[note.add(prompt)] is None


WORDS = [
    "capital",
    "of",
    "Italy",
    "?",
    "\n",
    "  ",
    "é",
    "日本",
    "🦙",
    "<b>",
    "{{ x }}",
    "{% if %}",
    "'",
    '"',
    "\\n",
    "\t",
    "1,000",
    "\u200b",
    "e\u0301",
    "\r\n",
    "[INST]",
    "user:",
    "assistant",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_500_chats_are_rendered_as_vllm_renders_them(
    renderers: Callable[[str, Any], OnlineRenderer], template: str
) -> None:
    draw, tokenizer = random.Random(51), AutoTokenizer.from_pretrained(MODEL_DIR)
    renderer = renderers(TEMPLATES[template], tokenizer)

    def text() -> str:
        return "".join(
            draw.choice(("", " ")) + draw.choice(WORDS) for _ in range(draw.randrange(12))
        )

    for number in range(100):
        messages = [
            turn(text()) if position % 2 == 0 else assistant(text())
            for position in range(draw.choice((1, 1, 3, 5, 2)))
        ]
        if draw.random() < 0.4:
            messages = [
                {"role": draw.choice(("system", "developer")), "content": text()},
                *messages,
            ]
        if draw.random() < 0.2:
            messages[-1]["content"] = [{"type": "text", "text": messages[-1]["content"]}]
        prompt = rendered_by(renderer, tokenizer, CHATS, messages=messages)
        assert prompt.same, (number, messages, prompt.text)


GATES, OBSERVES = Policy("gate", Action.ABSTAIN), Policy("observe", Action.OBSERVE)


def checked(
    note: Note,
    engine: Any = None,
    policy: Policy = OBSERVES,
    *,
    number: int = 0,
    rendering: tuple[str, ...] = (),
    compared: bool = True,
    may: tuple[str, ...] = (),
    guarantee: Any = None,
    shapes: Any = None,
    scripts: Any = None,
    renders: Any = None,
) -> tuple[Any, bool]:
    """The turn of a prompt whose rendering was checked, and whether it is unlike training's.

    ``engine``: whose tokens are compared; ``shapes``, ``scripts``: those of training, where the
    bundle records them; ``renders``: a scorer whose own engine tells what a caller has rendered."""
    training = SimpleNamespace(shapes=shapes, scripts=scripts)
    manifest: Any = SimpleNamespace(guarantee=guarantee, guarantee_shapes=None, training=training)
    scorer = renders or SimpleNamespace()
    scorer.prompt_format, scorer.bundle = "chat", SimpleNamespace(manifest=manifest)
    service: Any = SimpleNamespace(
        settings=SimpleNamespace(callers_may=may),
        catalogue=SimpleNamespace(refusals=frozenset({"I am not sure."})),
    )
    request = SamplingParams(), "a", lambda: None
    driver = TurnDriver(
        service, engine, scorer, policy, note, number, *request, rendering, compared=compared
    )
    asyncio.run(driver._check_rendering())
    return driver, unlike_training(manifest, driver._standing) is not None


def of_chat(*messages: dict[str, Any], ids: Any = (1,), moves: tuple[str, ...] = ()) -> Note:
    """What is noted of a request whose chat became these token ids."""
    return Note(chats=[Chat([*messages], (), [*ids])], judgements=[None], moves=moves)


@pytest.mark.parametrize("guarantee", [GUARANTEE, None])
@pytest.mark.parametrize("may", [(), ("rendering",)])
@pytest.mark.parametrize("policy", [GATES, OBSERVES])
def test_a_prompt_is_compared_where_a_guarantee_or_a_gate_depends_on_it_and_off_the_loop(
    policy: Policy, may: tuple[str, ...], guarantee: Any
) -> None:
    tokens, threads = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR)), list[Any]()
    ids = tokens.encode_chat([turn()])

    def encode_chat(messages: Any, tools: Any = ()) -> list[int]:
        threads.append(threading.current_thread())
        return tokens.encode_chat(messages, tools)

    engine = SimpleNamespace(encode_chat=encode_chat)
    for compared, rendered, moved in (
        (True, ids, False),
        (True, ids[:-1], True),
        (False, ids[:-1], False),
    ):
        threads.clear()
        note = of_chat(turn(), ids=rendered)
        driver, _ = checked(note, engine, policy, compared=compared, may=may, guarantee=guarantee)
        matters = compared and (guarantee is not None or policy.action.withholds)
        other = matters and moved
        assert bool(threads) is matters
        assert threading.main_thread() not in threads
        assert note.violations == ((OTHER_RENDERING,) if other else ())
        assert (note.conversation(0) is None) is other
        assert driver._standing == Standing(
            None if other else shape_of([turn()]), other_rendering=other and not may
        )
        withholds = other and policy.action.withholds
        assert driver.policy.withhold_outside is (True if withholds else None)


def test_what_the_turns_before_ask_is_known_of_each_prompt() -> None:
    note = of_chat(turn(), assistant("I am not sure."), turn("Go on."))
    driver, _ = checked(note)
    assert driver._standing.shape.untrained
    assert "an earlier question that is still open" in note.violations[0]


BOTH = f"{turn()['content']} Also: what is the capital of Samoa?"
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def with_image(text: str) -> list[dict[str, Any]]:
    return [IMAGE, {"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("content", "moves", "rendering", "compared"),
    [
        (with_image, (), (MEDIA,), False),
        (str, ("chat_template_kwargs",), ("rendering: the request's own kwargs",), False),
        (str, (), (), True),
    ],
)
def test_several_questions_are_known_of_a_chat_that_is_rendered_otherwise_or_holds_an_image(
    content: Any, moves: tuple[str, ...], rendering: tuple[str, ...], compared: bool
) -> None:
    """Whatever lets such a chat pass besides, such as an operator who allows callers to switch
    thoughts off."""
    tokens = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR))
    for text, several in ((BOTH, True), ("Hi!", False)):
        note = of_chat(turn(content(text)), moves=moves)
        driver, unlike = checked(
            note, tokens, GATES, rendering=rendering, compared=compared, may=("rendering",)
        )
        assert unlike is several
        assert driver._standing.no_fact_below(TELLS_TALK) == 0.0, "as small talk nothing passes"
        assert any("several questions" in violation for violation in note.violations) is several


@pytest.mark.parametrize("may", [(), ("rendering",)])
def test_a_chat_that_the_caller_has_rendered_is_known_from_its_token_ids(
    may: tuple[str, ...],
) -> None:
    """As a text or as ids of /v1/completions."""
    tokens: Any = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR))
    alone, scorer = tokens.encode_chat([turn()]), Scorer.__new__(Scorer)
    scorer.engine = tokens
    for ids, several, another in (
        (tokens.encode_chat([turn(BOTH)]), True, False),
        (alone, False, False),
        ([alone[0], *tokens.tokenize("Think.")[1:], *alone[1:]], False, True),
    ):
        number = (note := Note(templated=False)).add({"prompt_token_ids": ids})
        driver, unlike = checked(
            note,
            tokens,
            GATES,
            number=number,
            rendering=(NO_TEMPLATE,),
            compared=False,
            may=may,
            renders=scorer,
        )
        assert unlike is (several or (another and not may))
        assert driver._standing.no_fact_below(TELLS_TALK) == 0.0
        assert note.violations[0] == NO_TEMPLATE
        assert any("several questions" in violation for violation in note.violations) is several


@pytest.mark.parametrize(
    ("content", "rendering", "compared"),
    [(str, (), True), (with_image, (MEDIA,), False)],
)
def test_a_shape_that_training_never_had_is_known_of_a_chat_however_it_is_rendered(
    content: Any, rendering: tuple[str, ...], compared: bool
) -> None:
    tokens = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR))
    lone = Shape("0", passage=False, system=False).around
    for before, shapes, expected in (
        ((), (lone,), False),
        ((assistant("Hello."),), (lone,), True),
        ((assistant("Hello."),), None, False),
    ):
        note = of_chat(turn("Hi!"), *before, turn(content("Hi!")))
        _, unlike = checked(
            note,
            tokens,
            GATES,
            rendering=rendering,
            compared=compared,
            may=("rendering",),
            shapes=shapes,
        )
        assert unlike is expected
        assert any("conversation:" in violation for violation in note.violations) is expected


@pytest.mark.parametrize("content", [str, with_image])
def test_a_script_that_training_never_had_is_known_of_a_chat(content: Any) -> None:
    tokens = Tokens(AutoTokenizer.from_pretrained(MODEL_DIR))
    for text, scripts, expected in (
        ("\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f", ("Latin",), True),
        ("\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f", ("Han", "Latin"), False),
        ("\u6cd5\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f", None, False),
        ("What does \u6771\u4eac mean?", ("Latin",), False),
    ):
        _, unlike = checked(
            of_chat(turn(content(text))), tokens, GATES, compared=False, scripts=scripts
        )
        assert unlike is expected, (text, scripts)


def test_a_chats_shape_is_told_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Any] = []

    def shape(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return shape_of(*given)

    monkeypatch.setattr(turns, "shape_of", shape)
    checked(of_chat(turn()))
    assert threads
    assert threading.main_thread() not in threads
