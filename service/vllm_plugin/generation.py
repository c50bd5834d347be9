"""vLLM's ``generate``: the same request, with the bundle and policy that apply; ``turn`` judges it.

Every answer of the server comes through here.  On a route whose response cannot carry a risk, an answer passes only
under a policy that observes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import HTTPException
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from service.access.callers import Caller
from service.api.request_schema import Arguments
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.wire import KEY
from service.errors import HalluTracerError, NotReady
from service.judging.guarantee import MEDIA, NO_TEMPLATE, OTHER_ENDING, shape_violations
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from service.serving.adapters import Adapters
from service.serving.catalogue import untemplated
from service.serving.service import Service
from service.settings import env
from service.vllm_plugin.note import CURRENT, IN_BACKGROUND, NO_PLACE, OURS, Note
from service.vllm_plugin.turn import Turn

Generate = Callable[..., AsyncGenerator[Any, None]]
OWN = ("retrieval_of", "include")  # our own service's alone
XARGS = tuple(name for name in Arguments.model_fields if not name.endswith(OWN))


def judging_generate(
    generate: Generate, service: Service, engine_of: Callable[[], VllmEngine], adapters: Adapters
) -> Generate:
    """Return ``generate`` with risks.  ``service`` may be loading, or have failed; ``engine_of`` is for a ready one."""

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
        place = note.add()
        try:
            base = service.ready.scorers[0]
            scorer, policy = _resolve(service, xargs, base if adapter is None else adapters.scorer(adapter))
            adapters.check(adapter, scorer)
        except HalluTracerError as error:
            if not observes(service, xargs):
                if isinstance(error, NotReady):
                    raise HTTPException(error.status, str(error)) from error
                raise VLLMValidationError(str(error), parameter="model") from error
            note.unread = str(error)
            return start()
        withholds = policy.action is not Action.OBSERVE
        if withholds and note.forges is not None:
            said = f"a message spells out the special token {note.forges!r}, which could end its turn; remove it"
            raise VLLMValidationError(said, parameter="messages")
        if withholds and note.moves and "rendering" not in service.settings.callers_may:
            said = f"{note.moves[0]!r} has the messages rendered otherwise than in training, where no risk is known; "
            said += f"leave it out, or have the operator allow it with {env('callers-may')}=rendering"
            raise VLLMValidationError(said, parameter=note.moves[0])
        if withholds and note.background:
            raise VLLMValidationError(IN_BACKGROUND, parameter="background")
        if note.beams:
            note.unread = "beam search runs many requests, none of which is the answer: its risk is not measured"
            if withholds:
                raise VLLMValidationError(note.unread, parameter="use_beam_search")
            return start()
        if (field := policy.reads_answers_for) and parameters.n != 1:
            said = f"policy {policy.name!r} has {field}, which reads one answer to a prompt: leave 'n' out"
            raise VLLMValidationError(said, parameter="n")
        if rendering := _rendering(note, scorer, prompt):
            policy = untemplated(scorer, policy)
        note.choices = parameters.n
        shapes = shape_violations(scorer.bundle.manifest, [note.shape(place)])
        note.violations = tuple(dict.fromkeys((*note.violations, *_violations(parameters), *rendering, *shapes)))
        same = partial(adapters.check, adapter, scorer)
        turn = Turn(service, engine_of(), scorer, policy, note, place, parameters, request_id, same)
        return _reported(note, turn.outputs(start))

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
    given = dict(note.xargs or parameters.extra_args or {})
    extra = {name: value for name, value in given.items() if name not in XARGS and name != KEY}
    parameters.extra_args = extra or None
    for name in (*extra, *note.misplaced):
        if OURS.match(name):
            said = f"{name!r} has no effect here: 'vllm_xargs' takes {', '.join(XARGS)}"
            raise VLLMValidationError(said, parameter=name)
    return {name: given[name] for name in XARGS if name in given}


def _resolve(service: Service, xargs: dict[str, Any], own: Scorer) -> tuple[Scorer, Policy]:
    """Return the scorer and policy that apply.  Raises NotReady, and VLLMValidationError naming the argument."""
    bundle, policy, threshold = (xargs.get(name) for name in XARGS)
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
        raise VLLMValidationError(f"{XARGS[2]} must be a number in [0, 1]", parameter=f"vllm_xargs.{XARGS[2]}")
    try:
        return service.ready.choose(
            Caller(may=frozenset(service.settings.callers_may)), "", model=own.engine.identity.model,
            bundle=None if bundle is None else str(bundle), policy=None if policy is None else str(policy),
            threshold=threshold,
        )  # fmt: skip
    except NotReady:
        raise
    except HalluTracerError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def observes(service: Service, xargs: dict[str, Any]) -> bool:
    """Return whether the policy only observes; any other must let nothing through while the service is not ready."""
    own = service.settings.policy
    applied = [own, str(xargs.get(XARGS[1], own))]
    if "policy" in service.settings.callers_may:
        del applied[0]
    named = service.catalogue.policies.named
    return all((policy := named.get(name)) is not None and policy.action is Action.OBSERVE for name in applied)


def _rendering(note: Note, scorer: Scorer, prompt: Any) -> tuple[str, ...]:
    """Return how the prompt departs from what the chat template makes of a question; nothing without a template."""
    if isinstance(prompt, Mapping) and prompt.get("mm_placeholders"):
        return (MEDIA,)
    if scorer.prompt_format != "chat":
        return ()
    if not note.templated:
        return (NO_TEMPLATE,)
    if note.moves or note.answered:
        return (*(f"rendering: the request's own {name!r}" for name in note.moves), *note.answered)
    ids, ending = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None, scorer.chat_ending
    return () if ids and tuple(ids[max(0, len(ids) - len(ending)) :]) == ending else (OTHER_ENDING,)


def _violations(parameters: Any) -> tuple[str, ...]:
    """Return how the answer departs from a greedy one, on which guarantees are calibrated."""
    changed = [f"temperature {parameters.temperature:g}"] if parameters.temperature else []
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
    changed += [name for name, value in neutral.items() if getattr(parameters, name) != value]
    names = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs")
    changed += [name for name in (*names, "ignore_eos") if getattr(parameters, name)]
    return (f"decoding: not plainly greedy ({', '.join(changed)})",) if changed else ()
