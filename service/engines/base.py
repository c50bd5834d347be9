"""The engine contract: token ids in, numbers out.  Imports neither torch nor an engine.

Training and serving both use ``Engine``, so a probe reads activations computed by the code it was
fitted on.  A model runner is a ``BatchEngine``, which ``scheduler.Scheduled`` turns into an Engine;
vLLM schedules by itself."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from probes_store.records import Context, TemplateArgument
from service.engines.chat import Message, ToolDefinition
from service.engines.formats import Format
from service.errors import EngineError
from service.readout import Geometry, Pooling, Probes, Site
from service.risk import depth_mean, risk

TokenIds = Sequence[int]
Prompts = Sequence[TokenIds]
Seeds = Sequence[Sequence[int]]  # of several answers, by prompt
Sites = Sequence[Site]
EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class EngineOptions:
    """How to load a model."""

    model: str
    revision: str | None = None
    dtype: str = "auto"  # auto: float32 on CPU, the checkpoint's own on CUDA
    device: str = "auto"  # auto: cuda where there is one
    # padded tokens in one forward pass; None: the device's default
    max_batch_tokens: int | None = None
    trust_remote_code: bool = False
    engine: EngineName = "transformers"
    adapter: str | None = None  # folder of a LoRA adapter: with it, the model is another one
    # of the chat template, for every chat
    template_arguments: Mapping[str, TemplateArgument] | None = None
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identifies a model; a bundle is only used with the model that it was fitted on."""

    model: str  # hub name, or the last part of the folder's path
    revision: str  # hub commit, or "local"
    fingerprint: str  # sha256 over config and weight files' sizes, heads and tails
    architecture: str  # e.g. LlamaForCausalLM
    model_type: str  # e.g. llama
    tokenizer: str  # sha256 of the tokenizer's own serialisation
    chat_template: str | None  # sha256, None where the tokenizer has none
    dtype: str  # float32 | bfloat16 | float16
    geometry: Geometry
    max_tokens: int  # longest prompt plus answer
    adapter: str | None = None  # sha256 over the adapter, ``adapters.digest_of``
    # What the chat template is given besides messages and tools; None: nothing.
    template_arguments: Mapping[str, TemplateArgument] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose a request is, and its place in the order of service; the lowest goes first."""

    caller: str = ""
    place: int = 0


FIRST_COME = Turn()
MAX_STOPS, MAX_STOP_CHARACTERS = 8, 256  # of an answer: each text is looked for at each token


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode.  ``temperature`` 0 is greedy."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()  # at most MAX_STOPS of 1 to MAX_STOP_CHARACTERS characters
    # on the monotonic clock; there an answer ends as one of ``max_tokens`` tokens does
    until: float = math.inf
    format: Format | None = None  # ``LoadedModel.prepared``'s, which the answer is held to


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first answer token's distribution, from the prefill's logits."""

    log_max_prob: float  # nats, <= 0
    entropy: float  # nats, >= 0
    token: int  # the greedy first token


@dataclass(frozen=True)
class PrefillResult:
    """The readouts at one prompt's answer onset t*."""

    trajectories: tuple[NDArray[np.float64], ...]  # one [m] for each requested probe
    first_token: FirstToken | None  # only if requested
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.  ``token_ids`` includes the end token, if one was sampled; ``text`` does
    not."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: (
        str  # "stop" | "length" | "cancelled", or "content_filter" where a policy ended it
    )
    decoded: int | None = None  # tokens, where their ids are not known
    stop: str | None = None  # which of the request's own texts ended it; None: none of them

    @property
    def tokens(self) -> int:
        """Return how many tokens were decoded."""
        return len(self.token_ids) if self.decoded is None else self.decoded


@dataclass(frozen=True)
class Extraction:
    """Activations of a batch, for training."""

    activations: dict[Site, NDArray[np.float32]]  # site -> [n, m, width], at t*
    first_tokens: tuple[FirstToken, ...]
    # of no engine of this room
    pooled: dict[tuple[Site, Pooling], NDArray[np.float32]] = field(default_factory=dict)
    completions: tuple[Completion, ...] = ()  # with ``sampling``
    # [n, m, width] with ``answer_site``: over ``AnswerReading``'s tokens
    answers: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AnswerReading:
    """The truth logits of an answer's own tokens: of all that the model went on from, so not of the
    last one."""

    tokens: int  # >= 1
    trajectory: NDArray[np.float64]  # [m] mean over these tokens


@dataclass(frozen=True, eq=False)
class TracedAnswer:
    """An answer of T tokens, the end token included, and what the model computed while it wrote
    them."""

    completion: Completion
    # [T] each token's under the model itself, whatever the temperature, nats
    log_prob: NDArray[np.float64]
    # [m, hidden_size] residual stream of the token before the T-th; of t* where T is 1
    last: NDArray[np.float32]
    mean: NDArray[np.float32]  # [m, hidden_size] the same, mean over the first T - 1 tokens


@dataclass
class Counters:
    """Work done since the engine started."""

    forward_tokens: int = 0  # tokens that went through the forward pass, padding excluded
    prefills: int = 0  # prompts
    decode_steps: int = 0
    open_continuations: int = 0


@dataclass(frozen=True, slots=True)
class PromptContext:
    """The probabilities of one prompt; None where the bundle has no such probe."""

    asks: float | None = None  # that it asks for a fact
    passage: float | None = None  # that text to answer from stands beside the question
    stated: float | None = None  # P(passage) P(that text states the answer)
    # the same times ln(tokens of the prompt): in longer ones it is found less often
    stated_length: float | None = None
    # False: it asks for no fact, so the risk does not apply; True where the bundle cannot tell
    applies: bool = True

    @property
    def said(self) -> bool | None:
        """``applies``, None where the bundle cannot tell."""
        return None if self.asks is None else self.applies


UNKNOWN = PromptContext()


def prompt_context(
    context: Context | None, depth_means: Sequence[float], prompt_tokens: int
) -> PromptContext:
    """Return the probabilities for the context probes' depth means, in the record's order, alike
    for every engine."""
    if context is None:
        return UNKNOWN
    pairs = zip(context.probes, depth_means, strict=True)
    probabilities = {
        probe.name: sigmoid(probe.weight * mean + probe.intercept) for probe, mean in pairs
    }
    asks, passage, stated = (probabilities.get(name) for name in ("asks", "passage", "stated"))
    stated = None if passage is None or stated is None else passage * stated
    length = None if stated is None else stated * math.log(prompt_tokens)
    needed = context.applicability
    applies = needed is None or asks is None or not asks < needed.threshold  # a NaN applies
    return PromptContext(asks, passage, stated, length, applies)


def sigmoid(z: float) -> float:
    """Return 1 / (1 + exp(-z)); never overflows, and a NaN stays one."""
    tail = math.exp(-abs(z)) if z == z else z
    return (1.0 if z >= 0 else tail) / (1.0 + tail)


@dataclass(frozen=True, slots=True)
class EngineGate:
    """Stop before the answer unless risk < threshold or no fact is asked for.  ``context``: of the
    next probes."""

    weight: tuple[float, ...]  # in the order of ``probes_store.manifest.SIGNALS``
    intercept: float
    threshold: float
    context: Context | None = None

    def closes(self, result: PrefillResult) -> bool:
        """Return whether the answer must not begin; a NaN risk closes the gate, too."""
        first = result.first_token
        probes = 0 if self.context is None else len(self.context.probes)
        means = [float(depth_mean(trajectory)) for trajectory in result.trajectories[: 1 + probes]]
        context = prompt_context(self.context, means[1:], result.prompt_tokens)
        token = (0.0, 0.0) if first is None else (first.log_max_prob, first.entropy)
        signals = (
            means[0],
            *token,
            context.passage or 0.0,
            context.stated or 0.0,
            context.stated_length or 0.0,
        )
        withheld = (
            not float(risk(np.array(signals), np.array(self.weight), self.intercept))
            < self.threshold
        )
        return withheld and context.applies


@dataclass(frozen=True, slots=True)
class Update:
    """Progress of one prompt.  The first update has ``prefill``; the last one of an answer has
    ``completion``."""

    prefill: PrefillResult | None = None
    piece: str = ""  # text; "" if the token completes no character
    tokens: int = 0  # decoded since the last update
    completion: Completion | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; with ``prefill``
    queue_s: float = 0.0  # from submission to the start of the first forward pass; with ``prefill``
    prefill_s: float = 0.0  # from there to the first token; with ``prefill``
    # so far, with ``answer_probes``; None before a token was read
    answer: AnswerReading | None = None


def prefill_of(update: Update) -> PrefillResult:
    """Return the prefill of a prompt's first update.  Raises EngineError if it has none."""
    if update.prefill is None:
        raise EngineError(
            "the engine sent an update before the prefill's; please report this bug of the engine"
        )
    return update.prefill


def unfinished() -> EngineError:
    """Return the error of a request whose updates ended before its answer was complete."""
    return EngineError("the engine ended a request before its answer was complete; try again")


@dataclass(frozen=True)
class TorchModel:
    """A model's modules, for methods that need gradients.  Not to be used while the engine runs."""

    model: Any
    head: Any  # the language-model head
    blocks: Sequence[Any]
    device: Any


class Continuation(Protocol):
    """One prefilled prompt that can be decoded from its KV cache.  The caller of ``begin`` closes
    it."""

    prefill: PrefillResult  # the result at t*
    # what its answer's own tokens are read by; to be set before ``decode``
    answer_probes: Probes | None

    def decode(self, sampling: Sampling, cancelled: Callable[[], bool] = ...) -> Iterator[str]:
        """Yield one piece of text per token, "" if it completes no character, until ``cancelled()``
        or closed."""

    @property
    def completion(self) -> Completion | None:
        """The answer so far; None before ``decode``."""

    @property
    def reading(self) -> AnswerReading | None:
        """What ``answer_probes`` have read so far; None before a token."""

    def close(self) -> None:
        """Free the KV cache.  Safe to call twice."""


class LoadedModel(Protocol):
    """What batch and serving engines share.  ``tokenize``, ``render_chat``, ``check`` run on any
    thread at any time."""

    identity: ModelIdentity
    counters: Counters
    max_batch_tokens: int  # padded, in one forward pass
    special_tokens: tuple[str, ...]  # of the tokenizer, as they are spelt
    reads_answers: bool  # whether it reads an answer's own tokens
    # keys and values that a call with answers allocates, at most; 0 where they have their memory
    answer_bytes: int

    @property
    def torch_model(self) -> TorchModel | None:
        """The model's modules; None if they are in another process."""

    def tokenize(self, text: str) -> list[int]:
        """Encode plain text, with the tokenizer's own special tokens."""

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()
    ) -> list[int]:
        """Encode messages by the chat template, generation prompt included.

        Raises RequestError if it refuses them, or leaves out tools, calls of tools or their
        results."""

    def renders_alike(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        arguments: Mapping[str, TemplateArgument],
    ) -> bool:
        """Return whether the chat template makes the same of messages where it is given these
        arguments, too."""

    def detokenize(self, token_ids: TokenIds) -> str:
        """Decode ids, special tokens left out."""

    def spell(self, token_ids: TokenIds) -> str:
        """Decode ids, special tokens as they are spelt."""

    def prepared(self, asked: Format, caller: str = "", seconds: float = math.inf) -> Format:
        """Return a format as ``Sampling`` takes it.  Slow, and on any thread but an event loop's.

        Raises RequestError, with the request's field and the reason, for a schema that cannot be
        compiled; TimeoutError where that has not ended after so many seconds; Overloaded where too
        many formats are in use; EngineError."""

    def check(self, prompts: Prompts) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first invalid prompt."""

    def score(
        self,
        prompts: Prompts,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        last: Sequence[int] = (),
    ) -> list[PrefillResult]:
        """Prefill all prompts and wait.  Without ``first_token`` the forward pass may end at the
        last readout.

        ``last``: trajectories are means over so many last tokens of each prompt, as over an answer
        behind it; there are no first tokens.  Raises EngineError where the engine reads the last
        token only."""

    def extract(
        self,
        prompts: Prompts,
        sites: Sites,
        poolings: Sequence[Pooling] = (),
        sampling: Sampling | None = None,
        answer_site: Site | None = None,
        last: Sequence[int] = (),
    ) -> Extraction:
        """Return all heads' activations at t*; with ``sampling``, answers, too, and what was read
        of their own tokens at ``answer_site``.  ``last``: as of ``score``, and neither first tokens
        nor answers.  Raises EngineError for poolings, and where the engine reads no answers."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> list[Completion]:
        """Decode an answer to each prompt, in batches, for labelling."""

    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: Seeds
    ) -> list[list[TracedAnswer]]:
        """Decode an answer for each of a prompt's ``seeds``.  Raises EngineError if the engine
        cannot trace answers."""

    def next_token(self, prompts: Prompts, candidates: Sequence[int]) -> NDArray[np.float64]:
        """Return candidates' log-probabilities (nats) as first answer token, [n, candidates].
        Raises EngineError."""

    def close(self) -> None:
        """Free the model.  Later calls raise EngineError."""


class BatchEngine(LoadedModel, Protocol):
    """Runs one batch at a time, synchronously, from one thread at a time."""

    def begin(self, prompts: Prompts, probes: Sequence[Probes]) -> Sequence[Continuation]:
        """Prefill and keep the KV caches, so that any of the prompts can be decoded."""

    def in_chunks(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        kept: bool = False,
    ) -> Generator[PrefillResult | Continuation | None, None, None]:
        """Prefill one prompt by passes of at most ``max_batch_tokens``, one for each item; other
        calls run between.

        None stands for each pass but the last, which gives what ``score`` does, or with ``kept``
        what ``begin`` does, and raises as they do.  A model whose cache cannot be continued takes
        one pass.  Closing it frees the cache."""

    def pass_costs(self, prompt: TokenIds) -> Sequence[float]:
        """Return what each of these passes costs, in tokens that have none before them to attend
        to.

        A prompt of one pass costs about as much in a batch.  On any thread, at any time."""

    def step_together(self, continuations: Sequence[Any]) -> None:
        """Run the next token of all its continuations at about the cost of one; ``decode`` goes on
        from there.

        Where it raises, each can be run again, with others or alone: one that is not as it was
        before raises again."""


class Engine(LoadedModel, Protocol):
    """Serves prompts as they arrive.  Its synchronous methods may run at the same time, but not on
    an event loop."""

    on_prefill: Callable[[int, int], None]
    """Called with (prompts, tokens) after each forward pass over prompts, from any thread."""

    @property
    def alive(self) -> bool:
        """False once the engine has failed or was closed; it does not recover."""

    @property
    def scores_overtake_answers(self) -> bool:
        """Whether prompts without ``sampling`` overtake those that wait for space in the KV
        cache."""

    def seconds_to_read(self, prompt: TokenIds) -> float | None:
        """Return how long the engine takes to prefill a prompt alone, at the fastest that it was of
        late.

        None where too little was measured.  On any thread."""

    @property
    def waited_for_cpu_s(self) -> float:
        """Seconds for which its thread could have run and no CPU was free, so far; 0 where that is
        not known."""

    def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: EngineGate | None = None,
        turn: Turn = FIRST_COME,
        answer_probes: Probes | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Yield a prompt's prefill and, with ``sampling``, its answer; waiting prompts begin by
        ``turn``, then arrival.

        ``answer_probes``: updates say what they read of the answer's own tokens, where the engine
        ``reads_answers``. If ``gate`` closes, it ends with the prefill.  Closing it ends the
        request.  Raises what ``score`` raises."""
