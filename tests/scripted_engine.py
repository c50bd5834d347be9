"""A deterministic engine without a model and without torch, for tests of what is above engines.

Activations are drawn from a generator seeded by the sha256 of the token ids, so equal prompts have
equal activations in any batch and process.  Text is UTF-8 bytes.  Settings are plain attributes
that can be changed between calls."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from service.engines.base import (
    AnswerReading,
    Completion,
    Counters,
    Extraction,
    FirstToken,
    ModelIdentity,
    PrefillResult,
    Sampling,
    TokenIds,
    TracedAnswer,
)
from service.engines.chat import Message, ToolDefinition, check_shown
from service.engines.checks import check_onset_only, check_prompts, refuse_tracing
from service.engines.formats import LIMITS, Format, refused
from service.engines.grammar_process import failure_of
from service.errors import EngineError, RequestError
from service.readout import Geometry, Pooling, Probes, Site
from service.risk import truth_logits

BOS, CHAT, END = 256, 257, 258  # ids beyond the bytes
VOCABULARY = 259


class ScriptedEngine:
    """Implements ``base.BatchEngine`` with generated numbers.

    ``answer`` is the text of every completion, one byte per token.  ``sleep_s`` delays every
    forward pass and decode step, ``fail`` is raised by every forward pass, ``nan_layer`` fills that
    layer's activations with NaN, and ``before`` is called with the method's name at the start of
    each forward pass, so that a test can block or count."""

    def __init__(
        self,
        geometry: Geometry | None = None,
        *,
        model: str = "scripted",
        answer: str = "It is so.",
        max_tokens: int = 512,
        chat: bool = True,
    ) -> None:
        self.answer = answer
        self.sleep_s = 0.0
        self.closed = False
        self._chat = chat
        self.takes_tools = False
        self.fail: Exception | None = None
        self.nan_layer: int | None = None
        self.before: Callable[[str], None] | None = None
        self.counters = Counters()
        self.max_batch_tokens = 8192
        self.torch_model = None
        self.special_tokens, self.reads_answers, self.answer_bytes = ("<|end|>",), True, 0
        self.identity = ModelIdentity(
            model=model,
            revision="local",
            fingerprint=_sha("scripted"),
            architecture="ScriptedForCausalLM",
            model_type="scripted",
            tokenizer=_sha("utf-8"),
            chat_template=_sha("role: content") if chat else None,
            dtype="float32",
            max_tokens=max_tokens,
            geometry=geometry or Geometry(num_layers=4, num_heads=2, head_dim=8, hidden_size=16),
        )

    def tokenize(self, text: str) -> list[int]:
        """BOS and the UTF-8 bytes.  Raises RequestError on lone surrogates."""
        return [BOS, *_utf8(text)]

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()
    ) -> list[int]:
        """``role: content`` lines, with ``takes_tools`` calls and tools as JSON, and a generation
        prompt.

        Raises RequestError without messages or a template, and for what it would leave out."""
        if not self._chat or not messages:
            message = (
                "'messages' is empty"
                if self._chat
                else "this model's tokenizer has no chat template"
            )
            raise RequestError(message, param="messages")
        text = self._template(messages, tools)
        check_shown(self._template, messages, tools)
        return [BOS, *_utf8(text), CHAT]

    def renders_alike(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], arguments: object
    ) -> bool:
        """Its template reads no arguments."""
        return True

    def _template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> str:
        def more(found: object) -> str:
            return json.dumps(found, ensure_ascii=False) if found and self.takes_tools else ""

        turns = [
            f"{message['role']}: {message['content']}{more(message.get('tool_calls'))}\n"
            for message in messages
        ]
        return more(tools) + "".join(turns)

    def detokenize(self, token_ids: TokenIds) -> str:
        """Bytes to text, special ids left out."""
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def spell(self, token_ids: TokenIds) -> str:
        """Bytes to text, special ids by their numbers."""
        pieces = [bytes([token]) if token < 256 else f"<|{token}|>".encode() for token in token_ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        """A prompt's activations [m, width], so that a test can compute the expected numbers."""
        seed = hashlib.sha256(repr((str(site), [int(token) for token in prompt])).encode()).digest()
        shape = self.identity.geometry.num_layers, self.identity.geometry.width(site)
        generator = np.random.default_rng(int.from_bytes(seed[:16], "big"))
        activations = generator.standard_normal(shape, dtype=np.float32)
        if self.nan_layer is not None:
            activations[self.nan_layer] = np.nan
        return activations

    def first_token(self, prompt: TokenIds) -> FirstToken:
        """A prompt's first-token distribution."""
        byte = hashlib.sha256(repr([int(token) for token in prompt]).encode()).digest()[0]
        probability = (byte + 1) / 257
        entropy = -probability * np.log(probability) - (1 - probability) * np.log1p(-probability)
        token = self.answer.encode()[0] if self.answer else END
        return FirstToken(
            log_max_prob=float(np.log(probability)), entropy=float(entropy), token=token
        )

    def check(self, prompts: Sequence[TokenIds]) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first invalid prompt."""
        check_prompts(prompts, vocabulary=VOCABULARY, max_tokens=self.identity.max_tokens)

    def prepared(self, asked: Format, caller: str = "", seconds: float = math.inf) -> Format:
        """The format, if it can be compiled; ``answer`` is not held to it."""
        if self.before is not None:
            self.before("prepared")
        if failure := failure_of(asked.schema, LIMITS):
            raise refused(asked, failure)
        return asked

    def score(
        self,
        prompts: Sequence[TokenIds],
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        last: Sequence[int] = (),
    ) -> list[PrefillResult]:
        """Truth logits; a NaN is not refused, for tests of the callers."""
        self._forward("score", prompts)
        if not last:
            return [self._read(prompt, probes, first_token) for prompt in prompts]
        results = []
        for prompt, count in zip(prompts, last, strict=True):
            logits = tuple(self.read_last(prompt, count, each) for each in probes)
            results.append(PrefillResult(logits, None, len(prompt)))
        return results

    def read_last(self, tokens: TokenIds, count: int, probes: Probes) -> NDArray[np.float64]:
        """The mean of the truth logits at so many last tokens, [m]."""
        ends = [tokens[: len(tokens) - left] for left in range(count)]
        return np.asarray(
            np.mean([self._read(end, [probes], False).trajectories[0] for end in ends], axis=0)
        )

    def begin(
        self, prompts: Sequence[TokenIds], probes: Sequence[Probes]
    ) -> list[ScriptedContinuation]:
        """As ``score``, with continuations that yield ``answer``."""
        self._forward("begin", prompts)
        return [
            ScriptedContinuation(self, self._read(prompt, probes, True), prompt)
            for prompt in prompts
        ]

    def in_chunks(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        kept: bool = False,
    ) -> Generator[PrefillResult | ScriptedContinuation | None, None, None]:
        """As many passes as the prompt takes; ``before`` hears ``chunk`` of each but the last."""
        self.check([prompt])
        passes = -(-len(prompt) // self.max_batch_tokens)
        for _ in range(passes - 1):
            self._forward("chunk", ())
            self.counters.forward_tokens += self.max_batch_tokens
            yield None
        [result] = (
            self.begin([prompt], probes)
            if kept
            else self.score([prompt], probes, first_token=first_token)
        )
        self.counters.forward_tokens -= (passes - 1) * self.max_batch_tokens
        yield result

    def pass_costs(self, prompt: TokenIds) -> list[float]:
        """The tokens of each pass of ``in_chunks``: attention costs nothing."""
        full, rest = divmod(len(prompt), self.max_batch_tokens)
        return [float(self.max_batch_tokens)] * full + [float(rest)] * bool(rest)

    def step_together(self, continuations: Sequence[ScriptedContinuation]) -> None:
        """Each runs by itself."""

    def extract(
        self,
        prompts: Sequence[TokenIds],
        sites: Sequence[Site],
        poolings: Sequence[Pooling] = (Pooling.LAST_1,),
        sampling: Sampling | None = None,
        answer_site: Site | None = None,
        last: Sequence[int] = (),
    ) -> Extraction:
        """Activations [n, m, width], and answers.  Raises EngineError for any pooling but
        last_1."""
        check_onset_only(poolings)
        self._forward("extract", prompts)
        geometry, activations = self.identity.geometry, {}
        for site in sites:
            rows = np.zeros((len(prompts), geometry.num_layers, geometry.width(site)), np.float32)
            counts = last or [1] * len(prompts)
            for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
                ends = [prompt[: len(prompt) - left] for left in range(count)]
                rows[row] = np.mean([self.activations(end, site) for end in ends], axis=0)
            activations[site] = rows
        completions = () if sampling is None else tuple(self.generate(prompts, sampling))
        read = None
        if answer_site is not None:
            read = np.zeros(
                (len(prompts), geometry.num_layers, geometry.width(answer_site)), np.float32
            )
            for row, (prompt, said) in enumerate(zip(prompts, completions, strict=True)):
                ends = [
                    [*prompt, *said.token_ids[:index]] for index in range(1, len(said.token_ids))
                ]
                if ends:
                    read[row] = np.mean(
                        [self.activations(end, answer_site) for end in ends], axis=0
                    )
        return Extraction(
            activations,
            tuple(map(self.first_token, prompts)),
            completions=completions,
            answers=read,
        )

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        """``answer``, for every prompt."""
        completions = []
        for continuation in self.begin(prompts, ()):
            list(continuation.decode(sampling))
            assert continuation.completion is not None
            completions.append(continuation.completion)
        return completions

    def sample(
        self, prompts: Sequence[TokenIds], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[TracedAnswer]]:
        """Raises EngineError."""
        refuse_tracing("scripted")

    def next_token(
        self, prompts: Sequence[TokenIds], candidates: Sequence[int]
    ) -> NDArray[np.float64]:
        """Raises EngineError."""
        refuse_tracing("scripted")

    def close(self) -> None:
        """Later calls raise EngineError."""
        self.closed = True

    def wait(self) -> None:
        """Sleep for one step."""
        if self.sleep_s:
            time.sleep(self.sleep_s)

    def _forward(self, method: str, prompts: Sequence[TokenIds]) -> None:
        if self.closed:
            raise EngineError("this engine is closed; load the model again")
        self.check(prompts)
        if self.before is not None:
            self.before(method)
        self.wait()
        if self.fail is not None:
            raise self.fail
        self.counters.prefills += len(prompts)
        self.counters.forward_tokens += sum(len(prompt) for prompt in prompts)

    def _read(self, prompt: TokenIds, probes: Sequence[Probes], first_token: bool) -> PrefillResult:
        trajectories = []
        for probe in probes:
            readout = self.identity.geometry.select(
                self.activations(prompt, probe.site), probe.head, probe.site
            )
            trajectories.append(truth_logits(readout, probe.direction, probe.bias, probe.scale))
        return PrefillResult(
            tuple(trajectories), self.first_token(prompt) if first_token else None, len(prompt)
        )


class ScriptedContinuation:
    """Yields the engine's ``answer`` by character.  Implements ``base.Continuation``."""

    def __init__(self, engine: ScriptedEngine, prefill: PrefillResult, prompt: TokenIds) -> None:
        self._engine = engine
        self.prefill = prefill
        self._open = True
        self._prompt = prompt
        self.completion: Completion | None = None  # the answer so far; None before ``decode``
        self.answer_probes: Probes | None = None
        self.reading: AnswerReading | None = None
        self._read_ends = list[
            NDArray[np.float64]
        ]()  # at each token of the answer, the newest first
        engine.counters.open_continuations += 1

    def decode(
        self, sampling: Sampling, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[str]:
        """Yield the answer's characters; each of a character's UTF-8 bytes counts as a token."""
        if not self._open or self.completion is not None:
            raise EngineError(
                "this continuation is closed or being decoded; call begin again for another answer"
            )
        self.completion = Completion("", (), "cancelled")
        return self._decode(sampling, cancelled)

    def _decode(self, sampling: Sampling, cancelled: Callable[[], bool]) -> Iterator[str]:
        text = ""
        reason = "cancelled"
        ids = list[int]()
        answer, counters = self._engine.answer, self._engine.counters
        limit = min(
            sampling.max_tokens, self._engine.identity.max_tokens - self.prefill.prompt_tokens
        )
        stops = [(answer.find(stop), stop) for stop in sampling.stop if stop in answer]
        (end, stop), ended_by = min(stops, default=(len(answer), None)), None
        try:
            for character in answer[:end]:
                if cancelled() or not self._open:
                    return
                encoded = character.encode()
                if len(ids) + len(encoded) > limit or (ids and time.monotonic() >= sampling.until):
                    reason = "length"
                    return
                if ids:
                    self._went_on(ids)
                    self._engine.wait()
                    counters.decode_steps += len(encoded)
                    counters.forward_tokens += len(encoded)
                yield from [""] * (len(encoded) - 1)
                ids += encoded
                text += character
                self.completion = Completion(text, tuple(ids), reason)
                yield character
            reason, ended_by = "stop", stop
        finally:
            self.completion = Completion(text, tuple(ids), reason, stop=ended_by)
            self.close()

    def _went_on(self, ids: list[int]) -> None:
        """Read the answer's tokens so far, each of which the next one follows."""
        if self.answer_probes is not None and ids:
            for count in range(len(self._read_ends) + 1, len(ids) + 1):
                end = self._engine.read_last([*self._prompt, *ids[:count]], 1, self.answer_probes)
                self._read_ends.insert(0, end)
            self.reading = AnswerReading(len(ids), np.asarray(np.mean(self._read_ends, axis=0)))

    def close(self) -> None:
        """Safe to call twice."""
        self._engine.counters.open_continuations -= self._open
        self._open = False


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "the text holds a lone surrogate; send well-formed Unicode", param="prompt"
        ) from error
