"""vLLM's ``generate``: the same request, with the bundle and policy that apply; ``turn`` judges it.

Every answer of the server comes through here.  On a route whose response cannot carry a risk, an
answer passes only under a policy that observes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import HTTPException
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from probes_store import records
from service.access.callers import Caller
from service.api.request_schema import Arguments
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.wire import KEY
from service.errors import HalluTracerError, NotReady
from service.judging.guarantee import MEDIA, NO_TEMPLATE, length_violations
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from service.serving.adapters import Adapters
from service.serving.service import Service
from service.settings import DecodingChoice, env
from service.vllm_plugin.engine_gate import foretold
from service.vllm_plugin.note import CURRENT, IN_BACKGROUND, NO_PLACE, OURS, Note
from service.vllm_plugin.turn import TurnDriver

Generate = Callable[..., AsyncGenerator[Any, None]]
OWN = ("retrieval_of", "include")  # our own service's alone
XARGS = tuple(name for name in Arguments.model_fields if not name.endswith(OWN))


def judging_generate(
    generate: Generate, service: Service, engine_of: Callable[[], VllmEngine], adapters: Adapters
) -> Generate:
    """Return ``generate`` with risks.  ``service`` may be loading, or have failed; ``engine_of`` is
    for a ready one."""

    def wrapped(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        note = CURRENT.get() or Note(carries=False)
        try:
            return judged(note, prompt, sampling_params, *args, **kwargs)
        except VLLMValidationError as error:
            note.error = (400, str(error))
            raise
        except HTTPException as error:
            note.error = (error.status_code, error.detail)
            raise

    def judged(
        note: Note, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        parameters, xargs = sampling_params, dict[str, Any]()
        if isinstance(parameters, SamplingParams):
            parameters = parameters.clone()
            xargs = _take_xargs(note, parameters)
        adapter = kwargs.get("lora_request")

        def start() -> AsyncGenerator[Any, None]:
            return generate(prompt, parameters, request_id, *args, **kwargs)

        if not note.carries or parameters is sampling_params:
            if xargs or not observes(service, xargs):
                raise VLLMValidationError(NO_PLACE, parameter="hallutracer_policy")
            return start()
        index = note.add(prompt)
        try:
            base = service.ready.scorers[0]
            scorer, policy = _resolve(
                service, xargs, base if adapter is None else adapters.scorer(adapter)
            )
            adapters.check(adapter, scorer)
        except HalluTracerError as error:
            if not observes(service, xargs):
                if isinstance(error, NotReady):
                    raise HTTPException(error.status, str(error)) from error
                raise VLLMValidationError(str(error), parameter="model") from error
            note.unread = str(error)
            return start()
        withholds, engine = policy.action is not Action.OBSERVE, engine_of()
        note.trained_with(scorer.bundle.manifest.chat_template.arguments or {})
        if (
            withholds
            and note.written
            and (spelt := note.special_token(engine.special_token_in)) is not None
        ):
            raise VLLMValidationError(
                f"a message spells out the special token {spelt!r}, which could end its turn;"
                " remove it",
                parameter="messages",
            )
        if withholds and note.moves and "rendering" not in service.settings.callers_may:
            raise VLLMValidationError(
                f"{note.moves[0]!r} has the messages rendered otherwise than in training, where no"
                " risk is known; leave it out, or have the operator allow it with"
                f" {env('callers-may')}=rendering",
                parameter=note.moves[0],
            )
        if withholds and note.templated and "prompt_logprobs" not in note.sampling:
            parameters.prompt_logprobs = None  # vLLM's own, beside a chat's ``echo``
        if withholds and (problem := foretold(parameters)) is not None:
            raise VLLMValidationError(problem, parameter="prompt_logprobs")
        if withholds and note.background:
            raise VLLMValidationError(IN_BACKGROUND, parameter="background")
        if note.beams:
            note.unread = (
                "beam search runs many requests, none of which is the answer: its risk is not"
                " measured"
            )
            if withholds:
                raise VLLMValidationError(note.unread, parameter="use_beam_search")
            return start()
        if (field := policy.reads_answers_for) and parameters.n != 1:
            raise VLLMValidationError(
                f"policy {policy.name!r} has {field}, which reads one answer to a prompt: leave"
                " 'n' out",
                parameter="n",
            )
        note.choices = parameters.n
        manifest = scorer.bundle.manifest
        if (service.settings.decoding or _own_choice(policy)) == "bundle":
            _decode_as_trained(note, parameters, manifest.decoding or records.GREEDY)
        violations = _violations(parameters, manifest.calibrated_decoding)
        note.violations = tuple(dict.fromkeys((*note.violations, *violations)))
        same, rendering = partial(adapters.check, adapter, scorer), _rendering(note, scorer, prompt)
        compared = scorer.prompt_format == "chat" and rendering in ((), note.answered)
        driver = TurnDriver(
            service,
            engine,
            scorer,
            policy,
            note,
            index,
            parameters,
            request_id,
            same,
            rendering,
            compared=compared,
        )
        return _reported(note, driver.outputs(start))

    return wrapped


async def _reported(note: Note, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the outputs; an error of ours ends them as vLLM's servers know one."""
    try:
        async with aclosing(outputs):
            async for output in outputs:
                yield output
    except HalluTracerError as error:
        note.error = (error.status, str(error))
        raise HTTPException(error.status, str(error)) from error


def _take_xargs(note: Note, parameters: Any) -> dict[str, Any]:
    """Take our arguments out of ``vllm_xargs``, and a directive that a caller wrote.

    Raises VLLMValidationError for an argument that looks like ours and would have no effect."""
    xargs = dict(note.xargs or parameters.extra_args or {})
    extra = {name: value for name, value in xargs.items() if name not in XARGS and name != KEY}
    parameters.extra_args = extra or None
    for name in (*extra, *note.misplaced):
        if OURS.match(name):
            raise VLLMValidationError(
                f"{name!r} has no effect here: 'vllm_xargs' takes {', '.join(XARGS)}",
                parameter=name,
            )
    return {name: xargs[name] for name in XARGS if name in xargs}


def _resolve(service: Service, xargs: dict[str, Any], reader: Scorer) -> tuple[Scorer, Policy]:
    """Return the scorer and policy that apply.  Raises NotReady, and VLLMValidationError naming the
    argument."""
    bundle, policy, threshold = (xargs.get(name) for name in XARGS)
    if threshold is not None and (
        isinstance(threshold, bool) or not isinstance(threshold, int | float)
    ):
        raise VLLMValidationError(
            f"{XARGS[2]} must be a number in [0, 1]", parameter=f"vllm_xargs.{XARGS[2]}"
        )
    try:
        return service.ready.choose(
            Caller(may=frozenset(service.settings.callers_may)),
            "",
            model=reader.engine.identity.model,
            bundle=None if bundle is None else str(bundle),
            policy=None if policy is None else str(policy),
            threshold=threshold,
        )
    except NotReady:
        raise
    except HalluTracerError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def observes(service: Service, xargs: dict[str, Any]) -> bool:
    """Return whether the policy only observes; any other must let nothing through while the service
    is not ready."""
    settings, named = service.settings, service.catalogue.policies.named
    names = {str(xargs.get(XARGS[1], settings.policy))}
    if "policy" not in settings.callers_may:
        names.add(settings.policy)
    return all(name in named and named[name].action is Action.OBSERVE for name in names)


def _rendering(note: Note, scorer: Scorer, prompt: Any) -> tuple[str, ...]:
    """Return how the request's own words depart from what the chat template makes of a question."""
    if isinstance(prompt, Mapping) and prompt.get("mm_placeholders"):
        return (MEDIA,)
    if scorer.prompt_format != "chat":
        return ()
    if not note.templated:
        return (NO_TEMPLATE,)
    return (*(f"rendering: the request's own {name!r}" for name in note.moves), *note.answered)


def _own_choice(policy: Policy) -> DecodingChoice:
    """Return how answers are decoded where the operator has not said.

    A gate promises something of the answers that its risk is about; under a policy that observes, a
    server answers as it did before."""
    return "openai" if policy.action is Action.OBSERVE else "bundle"


def _decode_as_trained(note: Note, parameters: Any, decoding: records.Decoding) -> None:
    """Have an answer decoded as those were that its risk is about, unless the request names a
    temperature.

    What vLLM filled in by the model's ``generation_config`` goes, too.  Several answers to a prompt
    (n) are meant to differ, which greedy ones do not, and which vLLM refuses at temperature 0: they
        are sampled as vLLM has it."""
    greedy = decoding.same(records.GREEDY)
    if "temperature" in note.sampling or (greedy and parameters.n > 1):
        return
    trained = {"top_k": 0, "min_p": 0.0, "top_p": decoding.top_p, "repetition_penalty": 1.0}
    parameters.temperature = decoding.temperature
    for name, value in trained.items():
        if name not in note.sampling or (greedy and name != "repetition_penalty"):
            setattr(parameters, name, value)
    note.decoded = {"temperature": parameters.temperature, "top_p": parameters.top_p}


GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
SAME_ANSWER = {
    "n",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "output_text_buffer_length",
    "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
}
"""Fields that say what is told of an answer, and how, not what it is."""
TRANSFER = "kv_transfer_params"  # of ``extra_args``: how the prompt's cache gets here


def _violations(parameters: Any, calibrated: records.Decoding = records.GREEDY) -> tuple[str, ...]:
    """Return how the answer departs from those that a guarantee was calibrated on.

    Whatever else vLLM's sampling knows, now or later, departs where it is not as in ``GREEDY``."""
    same = records.Decoding(parameters.temperature, parameters.top_p).same(calibrated)
    changed = [] if same else [f"temperature {parameters.temperature:g}"]
    checked = SAME_ANSWER | {"temperature", "max_tokens", "extra_args"}
    checked |= {"top_p"} if same else set()
    for name in parameters.__struct_fields__:
        if name in checked or name.startswith("_"):
            continue
        if not _is_same(getattr(parameters, name), getattr(GREEDY, name)):
            changed.append(name)
    changed += ["vllm_xargs"] if (parameters.extra_args or {}).keys() - {TRANSFER} else []
    trained = f"{'plainly ' if calibrated.same(records.GREEDY) else ''}{calibrated}"
    decoding = (f"decoding: not {trained} ({', '.join(changed)})",) if changed else ()
    return (*decoding, *length_violations(parameters.max_tokens))


def _is_same(value: Any, neutral: Any) -> bool:
    """Return whether two plain values are the same, or both hold nothing; what is no plain value
    differs."""
    if value is neutral or (value is None and neutral in ([], {}, ())):
        return True
    if isinstance(value, list | dict | set | str) and not value:
        return not neutral
    return isinstance(value, int | float | str | list | dict) and bool(value == neutral)
