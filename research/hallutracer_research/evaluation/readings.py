"""What methods read of the labelled rows beyond the prompt's own readouts: the model's own answers
(the greedy one, its first word of content, what the model thinks of it, samples), other positions
of the prompt, another model, the text.

Readings are kept in files of a few rows, ``sets/NAME/answers/WHAT/00000.npz``, or as a run folder
of readouts.  The plan and the samples' seeds depend on the data alone, and an unfinished file is
computed again as a whole: a killed run goes on to the same files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.evaluation.methods import METHODS, OF_POSITIONS, SEP_BEHIND
from hallutracer_research.evaluation.methods.base import (
    AnswerReadings,
    BehindAnswers,
    OtherPositions,
    at_depths,
)
from hallutracer_research.evaluation.methods.own_answers import (
    asked,
    before_content,
    candidates,
    clusters,
    eigen_score,
    follow_up,
    log_odds,
)
from hallutracer_research.evaluation.methods.own_answers import semantic_entropy as entropy_of
from hallutracer_research.evaluation.options import EvaluateOptions
from hallutracer_research.evaluation.pooling import PoolingEngine, Span
from hallutracer_research.evaluation.prepare import PreparedSet, methods_of
from hallutracer_research.evaluation.splits import Arrays, kept, kept_score
from service.data.collection import batches, collect
from service.data.judges import make_judge
from service.data.labels import CLASSES, answer_texts, spoken_behind, verdict_on
from service.data.run_folder import claim, json_lines
from service.engines.base import Engine, Sampling
from service.errors import EngineError
from service.fitting.probes import ActivationArray, Floats, Index, Readouts
from service.prompts import PromptFormat, continuation, default_prompt_format, render
from service.readout import Site

AT_ONCE = 320  # answers in one file; a kill loses at most these
SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # Farquhar et al.'s, without their top-k of 50
SEED = 0
TOKEN_DEPTHS, LAST_TOKENS = (0.4, 0.6, 0.8), 32  # of the attention-pooled probe
QUESTION = "Is that correct?"  # asked behind the answer
BEGINNING = 24  # of an answer's tokens, each of which is kept
SCAFFOLD = "The answer is"  # what is read behind, as if the model had begun so
P_TRUE = {False: "p-true", True: "p-true-examples"}  # whether it is asked behind examples


def check_engine(engine: Engine, methods: Sequence[str]) -> None:
    """Raise EngineError, before anything slow, where the engine cannot do what the methods need."""
    reads = {METHODS[name].reads for name in methods}
    if SEP_BEHIND in methods or {"answer", "samples"} & reads:
        engine.sample([], SAMPLING, [])
    if OF_POSITIONS & set(methods) or "behind-answer" in reads:
        cast(PoolingEngine, engine).spans([], [])
    if not set(methods).isdisjoint(P_TRUE.values()):
        engine.next_token([], [token for side in candidates(engine) for token in side])


def with_readings(
    engine: Engine, prepared: PreparedSet, options: EvaluateOptions, prompt_format: PromptFormat
) -> PreparedSet:
    """Add what the set's methods read with the model that is evaluated.  Raises EngineError,
    PromptTooLong where a prompt that asks for P(True) does not fit, and RunMismatch."""
    methods = methods_of(prepared.rows, options)
    reader = _Reader(engine, prepared, options, prompt_format)
    wanted = {METHODS[name].reads for name in methods}
    inputs = prepared.inputs
    if OF_POSITIONS & set(methods):
        inputs = replace(inputs, positions=reader.positions())
    if "halluguard" in methods:
        inputs = replace(inputs, halluguard=reader.halluguard())
    answers: Arrays = {}
    for examples, name in P_TRUE.items():
        if name in methods:
            answers |= reader.p_true(examples)
    if {"perplexity", "mind"} & set(methods):
        answers |= reader.greedy()
    if "behind-answer" in wanted:
        inputs = replace(inputs, behind=reader.behind_answers())
    if "content" in wanted:
        answers |= reader.content()
    if "samples" in wanted or SEP_BEHIND in methods:
        answers |= reader.samples()
    rows = replace(prepared.rows, notes=(*prepared.rows.notes, *reader.notes))
    inputs = replace(inputs, answers=AnswerReadings(**answers))
    return replace(prepared, rows=rows, inputs=inputs)


def with_other_model(
    engine: Engine, prepared: PreparedSet, options: EvaluateOptions
) -> PreparedSet:
    """Add another model's readouts of the same rows, rendered as that model's own template does.
    Raises what ``collect`` raises."""
    rows = prepared.rows
    collection = collect(
        engine,
        rows.dataset,
        options.out / "sets" / rows.name / "other-model",
        sites=(Site.ATTENTION_HEAD,),
        prompt_format=default_prompt_format(engine),
        batch_rows=options.batch_rows,
    )
    readouts = Readouts(collection.rows[Site.ATTENTION_HEAD], prepared.index, prepared.inputs.label)
    tokens = collection.prompts.lengths[prepared.index]
    inputs = replace(prepared.inputs, other_model=readouts, other_tokens=tokens)
    return replace(prepared, inputs=inputs)


def with_embeddings(prepared: PreparedSet, options: EvaluateOptions) -> PreparedSet:
    """Add an embedding of each row's text, by the sentence encoder in ``options.embedder``."""
    assert options.embedder is not None
    inputs, folder = prepared.inputs, options.embedder
    arrays = _by_row(
        options.out / "sets" / prepared.rows.name / "embeddings",
        {"text": _digest(inputs.text), "embedder": str(folder.resolve())},
        np.array([len(text) for text in inputs.text]),
        "embeddings",
        lambda at: {"embedding": _embed(folder, [inputs.text[row] for row in at.tolist()])},
    )
    return replace(prepared, inputs=replace(inputs, embedding=arrays["embedding"]))


@cache
def _encoder(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(folder, local_files_only=True)


def _embed(folder: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the embeddings of texts, [n, d]: the mean of their tokens, scaled to unit norm, as of
    MiniLM; texts longer than the encoder's context are cut, as its users do."""
    import torch

    tokenizer, model = _encoder(folder)
    rows = []
    with torch.inference_mode():
        for start in range(0, len(texts), 32):
            batch = list(texts[start : start + 32])
            tokens = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            mask = tokens["attention_mask"][..., None].float()
            states = model(**tokens).last_hidden_state.float() * mask
            mean = states.sum(dim=1) / mask.sum(dim=1)
            rows.append(torch.nn.functional.normalize(mean, dim=1).numpy())
    return np.concatenate(rows)


def seeds_of(seed: int, row: int, count: int) -> list[int]:
    """Return seeds of one data row's samples; more samples begin with the same ones."""
    sequences = (np.random.SeedSequence([seed, row, number]) for number in range(count))
    return [int(sequence.generate_state(1)[0]) for sequence in sequences]


@dataclass(frozen=True, eq=False)
class _Reader:
    """One set's readings with the model that is evaluated."""

    engine: Engine
    prepared: PreparedSet
    options: EvaluateOptions
    prompt_format: PromptFormat

    notes: list[str] = field(default_factory=list)  # what a reader of the report must know

    @property
    def folder(self) -> Path:
        """The set's."""
        return self.options.out / "sets" / self.prepared.rows.name

    def kept(
        self,
        folder: str,
        name: str,
        make: Make,
        *,
        lengths: NDArray[np.integer] | None = None,
        at_once: int = AT_ONCE,
        **depends_on: Any,
    ) -> Arrays:
        """Return ``_by_row`` of the set's rows in one of its folders; ``lengths`` are those of the
        prompts by default."""
        rows = self.prepared.rows
        owner = {
            "data": rows.dataset.digest,
            "rows": _digest(self.prepared.index.tolist()),
            "model": self.engine.identity.fingerprint,
            "prompt_format": self.prompt_format,
            "max_new_tokens": rows.max_new_tokens,
            **depends_on,
        }
        lengths = self.prepared.inputs.prompt_tokens if lengths is None else lengths
        return _by_row(self.folder / folder, owner, lengths, name, make, at_once)

    def prompts(self, at: Index) -> list[list[int]]:
        """Return the prompts of these of the n rows."""
        return [self.prepared.prompts.prompts.of(int(row)) for row in self.prepared.index[at]]

    @cached_property
    def judged(self) -> list[str]:
        """The labelled rows' answers, as the judge read them."""
        records = json_lines(self.prepared.prompts.folder / "answers.jsonl")
        answers = {record["row"]: str(record["answer"]) for record in records}
        return [answers[row] for row in self.prepared.index.tolist()]

    def positions(self) -> OtherPositions:
        """Read the prompts at other positions, with ``SCAFFOLD`` behind them."""
        scaffold = continuation(self.engine, SCAFFOLD)
        layers = at_depths(self.engine.identity.geometry.num_layers, TOKEN_DEPTHS)
        names = ("last_8", "last_16", "behind")

        def read(at: Index) -> Arrays:
            prompts = self.prompts(at)
            ends = [len(prompt) for prompt in prompts]
            readouts = cast(PoolingEngine, self.engine).spans(
                [[*prompt, *scaffold] for prompt in prompts],
                [
                    [(max(0, end - 8), end), (max(0, end - 16), end), _last(end + len(scaffold))]
                    for end in ends
                ],
                layers=layers,
                count=LAST_TOKENS,
                ends=ends,
            )
            heads = dict(zip(names, readouts.heads, strict=True))
            return {"states": readouts.states, "first_token": readouts.first_token, **heads}

        depends_on: Any = {"layers": layers, "count": LAST_TOKENS, "scaffold": list(scaffold)}
        arrays: Any = self.kept("positions", "other positions", read, **depends_on)
        heads: Any = {name: self._heads(arrays.pop(name)) for name in names}
        tokens = np.full(len(self.prepared.index), len(scaffold))
        return OtherPositions(**arrays, **heads, scaffold=tokens)

    def behind_answers(self) -> BehindAnswers:
        """Read the judged answers' tokens, and behind them a user who asks ``QUESTION``."""
        question = follow_up(self.engine, QUESTION, self.prompt_format)
        answers = [continuation(self.engine, answer) for answer in self.judged]
        lengths = np.array([len(answer) for answer in answers])
        layers = range(self.engine.identity.geometry.num_layers)

        def spans(prompt: int, end: int) -> list[Span]:
            # An answer of no token at all has no last one: there the prompt's is read.
            begin = min(prompt, end - 1)
            tokens = [_last(min(begin + count, end)) for count in range(1, BEGINNING + 1)]
            return [_last(end), (begin, end), _last(end + len(question)), *tokens]

        def read(at: Index) -> Arrays:
            prompts = self.prompts(at)
            rows = [
                [*prompt, *answers[row]] for prompt, row in zip(prompts, at.tolist(), strict=True)
            ]
            ends = [len(row) for row in rows]
            readouts = cast(PoolingEngine, self.engine).spans(
                [[*row, *question] for row in rows],
                [spans(len(prompt), end) for prompt, end in zip(prompts, ends, strict=True)],
                layers=layers,
                count=1,
                ends=ends,
            )
            last, mean, behind_question, *tokens = readouts.heads
            return {
                "last": last,
                "mean": mean,
                "asked": behind_question,
                "tokens": np.stack(tokens, axis=1).astype(np.float16),
                "residual": readouts.states[:, :, 0],
            }

        arrays = self.kept(
            "answers/behind",
            "behind answers",
            read,
            lengths=self.prepared.inputs.prompt_tokens + lengths,
            answers=_digest(self.judged),
            question=list(question),
            each=BEGINNING,
        )
        return BehindAnswers(
            last=self._heads(arrays["last"]),
            mean=self._heads(arrays["mean"]),
            follow_up=self._heads(arrays["asked"]),
            residual=self._readouts(
                arrays["residual"][:, :, None].astype(np.float32), Site.RESIDUAL_STREAM
            ),
            tokens=arrays["tokens"],
            answer_tokens=np.maximum(1, lengths),
            question=np.full(len(lengths), len(question)),
        )

    def _heads(self, rows: NDArray[np.float32]) -> Readouts:
        """Return activations [n, m, width] of attention heads as readouts of all rows."""
        width = self.engine.identity.geometry.head_dim
        return self._readouts(rows.reshape(*rows.shape[:2], -1, width), Site.ATTENTION_HEAD)

    def _readouts(self, rows: NDArray[np.float32], site: Site) -> Readouts:
        every_row, label = np.arange(len(rows)), self.prepared.inputs.label
        return Readouts(ActivationArray(rows, site), every_row, label)

    def halluguard(self) -> Floats:
        """Score the answers from gradients, [n]."""
        from hallutracer_research.evaluation.methods.halluguard import halluguard_scores

        prompts, longest = self.prompts(np.arange(len(self.prepared.index))), self.prepared.rows
        make = partial(halluguard_scores, self.engine, prompts, longest.max_new_tokens)
        return kept_score(self.folder / "halluguard.npz", make)

    def p_true(self, examples: bool) -> Arrays:
        """Ask whether the judged answer is true, behind examples or without."""
        asking = [
            render(self.engine, asked(text, answer, examples=examples), None, self.prompt_format)
            for text, answer in zip(self.prepared.inputs.text, self.judged, strict=True)
        ]
        # Longest first: what does not fit is told at once.
        lengths = np.array([len(prompt) for prompt in asking])
        arrays = self.kept(
            f"answers/{P_TRUE[examples]}",
            "P(True)",
            lambda at: {"true": log_odds(self.engine, [asking[row] for row in at.tolist()])},
            lengths=lengths,
            answers=_digest(self.judged),
        )
        suffix = "_examples" if examples else ""
        return {f"true{suffix}": arrays["true"], f"true_tokens{suffix}": lengths.astype(np.float64)}

    def greedy(self) -> Arrays:
        """Decode the answers again, for their probability and their states."""
        from hallutracer_research.evaluation.methods.networks import features

        def answer(at: Index) -> Arrays:
            sampling = Sampling(max_tokens=self.prepared.rows.max_new_tokens)
            by_row = self.engine.sample(self.prompts(at), sampling, [[0]] * len(at))
            traced = [answer for (answer,) in by_row]
            return {
                "text": np.array([answer.completion.text for answer in traced]),
                "log_prob": np.array([answer.log_prob.mean() for answer in traced]),
                "states": np.stack([features(answer) for answer in traced]),
            }

        arrays = self.kept("answers/greedy", "greedy answers", answer)
        again = arrays.pop("text").tolist()
        if differ := sum(text != judged for text, judged in zip(again, self.judged, strict=True)):
            self.notes.append(
                f"{differ} of {len(again)} answers, decoded again for their scores, differ"
                " from the judged ones"
            )
        return arrays

    def content(self) -> Arrays:
        """Read the distribution of the judged answer's first token of content."""
        inputs = self.prepared.inputs
        begun = [
            before_content(self.engine, text, answer)
            for text, answer in zip(inputs.text, self.judged, strict=True)
        ]
        decoded = np.array([len(tokens) for tokens in begun], np.int64)
        later = np.flatnonzero(decoded)  # of the others the first token is that token, and is known

        def read(at: Index) -> Arrays:
            rows = later[at]
            prompts = [
                [*prompt, *begun[row]] for prompt, row in zip(self.prompts(rows), rows, strict=True)
            ]
            tokens = self.engine.extract(prompts, ()).first_tokens
            return {"content": np.array([[token.log_max_prob, token.entropy] for token in tokens])}

        content = inputs.first_token.copy()
        if len(later):
            arrays = self.kept(
                "answers/content",
                "first words of content",
                read,
                lengths=(inputs.prompt_tokens + decoded)[later],
                answers=_digest(self.judged),
                read="where tokens stand before it",
            )
            content[later] = arrays["content"]
        return {"content": content, "decoded": decoded.astype(np.float64)}

    def samples(self) -> Arrays:
        """Sample answers; their semantic entropies and EigenScore."""
        engine, count = self.engine, self.options.samples
        sampling = replace(SAMPLING, max_tokens=self.prepared.rows.max_new_tokens)
        layer = engine.identity.geometry.num_layers // 2

        def sample(at: Index) -> Arrays:
            seeds = [seeds_of(SEED, int(row), count) for row in self.prepared.index[at]]
            prompts = self.prompts(at)
            by_row: dict[str, list[Any]] = {"text": [], "log_prob": [], "eigenscore": []}
            samples = engine.sample(prompts, sampling, seeds)
            for prompt, answers in zip(prompts, samples, strict=True):
                texts = [answer_texts(answer.completion, prompt, engine)[0] for answer in answers]
                states = np.stack([answer.last[layer] for answer in answers])
                by_row["text"].append(texts)
                by_row["log_prob"].append([answer.log_prob.mean() for answer in answers])
                by_row["eigenscore"].append(eigen_score(states))
            return {name: np.array(values) for name, values in by_row.items()}

        arrays = self.kept(
            f"answers/samples-{count}",
            "samples",
            sample,
            at_once=max(1, AT_ONCE // count),
            samples=count,
            sampling=asdict(sampling),
            seed=SEED,
        )
        groups = [
            clusters(question, texts.tolist())
            for question, texts in zip(self.prepared.inputs.text, arrays["text"], strict=True)
        ]
        return {
            "right": self._share_right(arrays["text"]),
            "eigenscore": arrays["eigenscore"],
            "entropy": np.array(list(map(entropy_of, groups))),
            "entropy_weighted": np.array(list(map(entropy_of, groups, arrays["log_prob"]))),
        }

    def _share_right(self, samples: NDArray[np.str_]) -> Floats:
        """Return the share of answers [n, samples] that are right, of those that belong to a class;
        NaN where none."""
        options, index = self.prepared.rows.judge, self.prepared.index
        judge, shares = make_judge(options), []
        prompts = self.prompts(np.arange(len(index)))
        for number, prompt, texts in zip(index.tolist(), prompts, samples.tolist(), strict=True):
            row = self.prepared.rows.dataset.rows[number]
            of_row = row.question, row.answers, judge, options.abstains
            spoken = [spoken_behind(prompt, text, self.engine) for text in texts]
            verdicts = [verdict_on(text, *of_row) for text in spoken]
            labels = [CLASSES[verdict] for verdict in verdicts if verdict in CLASSES]
            shares.append(np.mean(labels) if labels else np.nan)
        return np.array(shares, np.float64)


Make = Callable[[Index], Arrays]
"""Rows -> arrays of these."""


def _by_row(
    folder: Path,
    owner: Mapping[str, Any],
    lengths: NDArray[np.integer],
    name: str,
    make: Make,
    at_once: int = AT_ONCE,
) -> Arrays:
    """Return arrays of all n rows, made in files of ``at_once`` of them, longest prompts first, or
    read from them."""
    claim(folder, dict(owner) | {"rows_in_a_file": at_once})
    plan = batches(lengths, at_once)
    parts = []
    with tqdm(total=len(lengths), desc=name, unit="row", mininterval=1) as bar:
        for number, rows in enumerate(plan):
            parts.append(kept(folder / f"{number:05d}.npz", partial(make, rows)))
            bar.update(len(rows))
    joined: Arrays = {}
    for key, values in list(parts[0].items()):
        joined[key] = np.empty(
            (len(lengths), *values.shape[1:]), np.result_type(*(part[key].dtype for part in parts))
        )
        for rows, part in zip(plan, parts, strict=True):
            joined[key][rows] = part.pop(key)  # some are gigabytes
    floats = {key: values for key, values in joined.items() if values.dtype.kind == "f"}
    if bad := [key for key, values in floats.items() if not np.isfinite(values).all()]:
        raise EngineError(f"{name} hold a NaN or an infinity ({', '.join(bad)}): try another dtype")
    return joined


def _last(end: int) -> tuple[int, int]:
    return end - 1, end


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()
