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
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
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
from hallutracer_research.evaluation.prepare import PreparedSet, SetRows, methods_of
from hallutracer_research.evaluation.splits import kept
from service.data.collection import batches, collect
from service.data.judges import make_judge
from service.data.labels import CLASSES, answer_texts, spoken_behind, verdict_on
from service.data.run_folder import claim, json_lines
from service.engines.base import Engine, Sampling
from service.errors import EngineError
from service.fitting.probes import ActivationArray, Floats, Readouts
from service.prompts import PromptFormat, continuation, default_prompt_format, render
from service.readout import Site

AT_ONCE = 320  # answers in one file; a kill loses at most these
SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # Farquhar et al.'s, without their top-k of 50
SEED = 0
TOKEN_DEPTHS, LAST_TOKENS = (0.4, 0.6, 0.8), 32  # of the attention-pooled probe
QUESTION = "Is that correct?"  # asked behind the answer
BEGINNING = 24  # of an answer's tokens, each of which is kept
SCAFFOLD = "The answer is"  # what is read behind, as if the model had begun so


def check_engine(engine: Engine, methods: Sequence[str]) -> None:
    """Raise EngineError, before anything slow, where the engine cannot do what the methods need."""
    if SEP_BEHIND in methods or any(
        METHODS[name].reads in ("answer", "samples") for name in methods
    ):
        engine.sample([], SAMPLING, [])
    if OF_POSITIONS & set(methods) or any(
        METHODS[name].reads == "behind-answer" for name in methods
    ):
        cast(PoolingEngine, engine).spans([], [])
    if {"p-true", "p-true-examples"} & set(methods):
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
    found: dict[str, Any] = {}
    if {"p-true", "p-true-examples"} & set(methods):
        found |= reader.p_true(
            [examples for examples in (False, True) if reader.p_true_name(examples) in methods]
        )
    if {"perplexity", "mind"} & set(methods):
        found |= reader.greedy()
    if "behind-answer" in wanted:
        inputs = replace(inputs, behind=reader.behind_answers())
    if "content" in wanted:
        found |= reader.content()
    if "samples" in wanted or SEP_BEHIND in methods:
        found |= reader.samples()
    return replace(
        prepared, rows=reader.rows, inputs=replace(inputs, answers=AnswerReadings(**found))
    )


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
    other = Readouts(collection.rows[Site.ATTENTION_HEAD], prepared.index, prepared.inputs.label)
    tokens = collection.prompts.lengths[prepared.index]
    return replace(prepared, inputs=replace(prepared.inputs, other=other, other_tokens=tokens))


def with_embeddings(prepared: PreparedSet, options: EvaluateOptions) -> PreparedSet:
    """Add an embedding of each row's text, by the sentence encoder in ``options.embedder``."""
    assert options.embedder is not None
    inputs, encoder = prepared.inputs, _Encoder(options.embedder)
    found = _by_row(
        options.out / "sets" / prepared.rows.name / "embeddings",
        {"text": _digest(inputs.text), "embedder": str(options.embedder.resolve())},
        np.array([len(text) for text in inputs.text]),
        "embeddings",
        lambda at: {"embedding": encoder.encode([inputs.text[row] for row in at.tolist()])},
    )
    return replace(prepared, inputs=replace(inputs, embedding=found["embedding"]))


class _Encoder:
    """A sentence encoder whose sentences are the mean of their tokens, scaled to unit norm, as
    those of MiniLM are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoModel, AutoTokenizer

        given: dict[str, Any] = {"local_files_only": True}
        return AutoTokenizer.from_pretrained(self._folder, **given), AutoModel.from_pretrained(
            self._folder, **given
        )

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of texts, [n, d]; longer ones than the encoder's context are cut,
        as its users do."""
        import torch

        tokenizer, model = self._loaded
        rows = []
        with torch.inference_mode():
            for start in range(0, len(texts), 32):
                given = tokenizer(
                    list(texts[start : start + 32]),
                    padding=True,
                    truncation=True,
                    return_tensors="pt",
                )
                mask = given["attention_mask"][..., None].float()
                states = (model(**given).last_hidden_state.float() * mask).sum(dim=1) / mask.sum(
                    dim=1
                )
                rows.append(torch.nn.functional.normalize(states, dim=1).numpy())
        return np.concatenate(rows)


def seeds_of(seed: int, row: int, count: int) -> list[int]:
    """Return seeds of one data row's samples; more samples begin with the same ones."""
    return [
        int(np.random.SeedSequence([seed, row, number]).generate_state(1)[0])
        for number in range(count)
    ]


@dataclass(frozen=True, eq=False)
class _Reader:
    """One set's readings with the model that is evaluated."""

    engine: Engine
    prepared: PreparedSet
    options: EvaluateOptions
    prompt_format: PromptFormat

    @cached_property
    def folder(self) -> Path:
        """The set's."""
        return self.options.out / "sets" / self.prepared.rows.name

    @cached_property
    def notes(self) -> list[str]:
        """What a reader of the report must know of these readings."""
        return []

    @property
    def rows(self) -> SetRows:
        """Return the set's rows with the notes."""
        return replace(self.prepared.rows, notes=(*self.prepared.rows.notes, *self.notes))

    @cached_property
    def owner(self) -> dict[str, Any]:
        """What the readings depend on."""
        rows = self.prepared.rows
        return {
            "data": rows.dataset.digest,
            "rows": _digest(self.prepared.index.tolist()),
            "model": self.engine.identity.fingerprint,
            "prompt_format": self.prompt_format,
            "max_new_tokens": rows.max_new_tokens,
        }

    def prompts(self, at: NDArray[np.int64]) -> list[list[int]]:
        """Return the prompts of these of the n rows."""
        return [self.prepared.prompts.prompts.of(int(row)) for row in self.prepared.index[at]]

    @cached_property
    def judged(self) -> list[str]:
        """The labelled rows' answers, as the judge read them."""
        records = json_lines(self.prepared.prompts.folder / "answers.jsonl")
        said = {record["row"]: str(record["answer"]) for record in records}
        return [said[row] for row in self.prepared.index.tolist()]

    def positions(self) -> OtherPositions:
        """Read the prompts at other positions, with ``SCAFFOLD`` behind them."""
        scaffold = continuation(self.engine, SCAFFOLD)
        layers = at_depths(self.engine.identity.geometry.num_layers, TOKEN_DEPTHS)
        sizes = {"layers": layers, "count": LAST_TOKENS}

        def read(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            prompts = self.prompts(at)
            ends = [len(prompt) for prompt in prompts]
            found = cast(PoolingEngine, self.engine).spans(
                [[*prompt, *scaffold] for prompt in prompts],
                [
                    [(max(0, end - 8), end), (max(0, end - 16), end), _last(end + len(scaffold))]
                    for end in ends
                ],
                layers=layers,
                count=LAST_TOKENS,
                ends=ends,
            )
            heads = dict(zip(("last_8", "last_16", "behind"), found.heads, strict=True))
            return {"states": found.states, "first_token": found.first_token, **heads}

        found = _by_row(
            self.folder / "positions",
            self.owner | sizes | {"scaffold": list(scaffold)},
            self.prepared.inputs.prompt_tokens,
            "other positions",
            read,
        )
        return OtherPositions(
            states=found["states"],
            first_token=found["first_token"],
            scaffold=np.full(len(self.prepared.index), len(scaffold)),
            **{name: self._heads(found[name]) for name in ("last_8", "last_16", "behind")},
        )

    def behind_answers(self) -> BehindAnswers:
        """Read the judged answers' tokens, and behind them a user who asks ``QUESTION``."""
        question = follow_up(self.engine, QUESTION, self.prompt_format)
        said = [continuation(self.engine, answer) for answer in self.judged]
        layers = range(self.engine.identity.geometry.num_layers)

        def spans(prompt: int, end: int) -> list[Span]:
            # An answer of no token at all has no last one: there the prompt's is read.
            begin = min(prompt, end - 1)
            each = [_last(min(begin + count, end)) for count in range(1, BEGINNING + 1)]
            return [_last(end), (begin, end), _last(end + len(question)), *each]

        def read(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            prompts, answers = self.prompts(at), [said[row] for row in at.tolist()]
            ends = [
                len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)
            ]
            found = cast(PoolingEngine, self.engine).spans(
                [
                    [*prompt, *answer, *question]
                    for prompt, answer in zip(prompts, answers, strict=True)
                ],
                [spans(len(prompt), end) for prompt, end in zip(prompts, ends, strict=True)],
                layers=layers,
                count=1,
                ends=ends,
            )
            heads = dict(zip(("last", "mean", "asked"), found.heads, strict=False))
            each = found.heads[len(heads) :].swapaxes(0, 1).astype(np.float16)
            return heads | {"tokens": each, "residual": found.states[:, :, 0]}

        found = _by_row(
            self.folder / "answers" / "behind",
            self.owner
            | {
                "answers": _digest(self.judged),
                "question": list(question),
                "each": BEGINNING,
            },
            self.prepared.inputs.prompt_tokens + np.array([len(one) for one in said]),
            "behind answers",
            read,
        )
        residual = ActivationArray(
            found["residual"][:, :, None].astype(np.float32), Site.RESIDUAL_STREAM
        )
        every = np.arange(len(self.prepared.index))
        return BehindAnswers(
            **{name: self._heads(found[name]) for name in ("last", "mean", "asked")},
            residual=Readouts(residual, every, self.prepared.inputs.label),
            tokens=found["tokens"],
            said=np.array([max(1, len(one)) for one in said]),
            question=np.full(len(every), len(question)),
        )

    def _heads(self, rows: NDArray[np.float32]) -> Readouts:
        """Return activations [n, m, width] of attention heads as readouts of all rows."""
        count, geometry = len(self.prepared.index), self.engine.identity.geometry
        shape = (count, geometry.num_layers, geometry.heads(Site.ATTENTION_HEAD), geometry.head_dim)
        file = ActivationArray(rows.reshape(shape), Site.ATTENTION_HEAD)
        return Readouts(file, np.arange(count), self.prepared.inputs.label)

    def halluguard(self) -> Floats:
        """Score the answers from gradients, [n]."""
        path = self.folder / "halluguard.npy"
        if not path.exists():
            from hallutracer_research.evaluation.methods.halluguard import halluguard_scores

            every = np.arange(len(self.prepared.index))
            scores = halluguard_scores(
                self.engine, self.prompts(every), self.prepared.rows.max_new_tokens
            )
            with path.with_suffix(".part").open("wb") as file:
                np.save(file, scores)
            path.with_suffix(".part").replace(path)
        return np.asarray(np.load(path, allow_pickle=False), np.float64)

    @staticmethod
    def p_true_name(examples: bool) -> str:
        """Return the method that asks so."""
        return "p-true-examples" if examples else "p-true"

    def p_true(self, ways: Sequence[bool]) -> dict[str, Any]:
        """Ask whether the judged answer is true, without or behind examples."""
        of_answers, readings = self.owner | {"answers": _digest(self.judged)}, dict[str, Any]()
        every: dict[bool, list[list[int]]] = {way: [] for way in ways}
        for text, answer in zip(self.prepared.inputs.text, self.judged, strict=True):
            for way, asking in every.items():
                question = asked(text, answer, examples=way)
                asking.append(render(self.engine, question, None, self.prompt_format))
        for way, asking in every.items():
            lengths = np.array(
                [len(prompt) for prompt in asking]
            )  # longest first: what does not fit is told at once
            folder = self.folder / "answers" / self.p_true_name(way)
            ask = partial(self._log_odds, asking)
            found = _by_row(folder, of_answers, lengths, "P(True)", ask)
            suffix = "_examples" if way else ""
            readings |= {
                f"true{suffix}": found["true"],
                f"asked{suffix}": lengths.astype(np.float64),
            }
        return readings

    def _log_odds(
        self, asking: Sequence[list[int]], at: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        return {"true": log_odds(self.engine, [asking[row] for row in at.tolist()])}

    def greedy(self) -> dict[str, Any]:
        """Decode the answers again, for their probability and their states."""
        from hallutracer_research.evaluation.methods.networks import features

        def answer(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            sampling = Sampling(max_tokens=self.prepared.rows.max_new_tokens)
            traced = [
                one for (one,) in self.engine.sample(self.prompts(at), sampling, [[0]] * len(at))
            ]
            return {
                "text": np.array([one.completion.text for one in traced]),
                "log_prob": np.array([one.log_prob.mean() for one in traced]),
                "states": np.stack([features(one) for one in traced]),
            }

        lengths = self.prepared.inputs.prompt_tokens
        greedy = _by_row(
            self.folder / "answers" / "greedy",
            self.owner,
            lengths,
            "greedy answers",
            answer,
        )
        said = zip(greedy.pop("text").tolist(), self.judged, strict=True)
        if other := sum(own != text for own, text in said):
            note = (
                f"{other} of {len(self.judged)} answers, decoded again for their scores, differ"
                " from the judged ones"
            )
            self.notes.append(note)
        return greedy

    def content(self) -> dict[str, Any]:
        """Read the distribution of the judged answer's first token of content."""
        begun = [
            before_content(self.engine, text, answer)
            for text, answer in zip(self.prepared.inputs.text, self.judged, strict=True)
        ]

        decoded = np.array([len(one) for one in begun], np.int64)
        later = np.flatnonzero(decoded)  # of the others the first token is that token, and is known

        def read(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            prompts = [
                [*prompt, *begun[row]]
                for prompt, row in zip(self.prompts(later[at]), later[at], strict=True)
            ]
            tokens = self.engine.extract(prompts, ()).first_tokens
            return {"content": np.array([[one.log_max_prob, one.entropy] for one in tokens])}

        content = self.prepared.inputs.first_token.copy()
        if len(later):
            lengths = (self.prepared.inputs.prompt_tokens + decoded)[later]
            of_answers = self.owner | {
                "answers": _digest(self.judged),
                "read": "where tokens stand before it",
            }
            folder, name = self.folder / "answers" / "content", "first words of content"
            content[later] = _by_row(folder, of_answers, lengths, name, read)["content"]
        return {"content": content, "decoded": decoded.astype(np.float64)}

    def samples(self) -> dict[str, Any]:
        """Sample answers; their semantic entropies and EigenScore."""
        engine = self.engine
        inputs, rows = self.prepared.inputs, self.prepared.rows
        count, sampling = self.options.samples, replace(SAMPLING, max_tokens=rows.max_new_tokens)
        layer = engine.identity.geometry.num_layers // 2

        def sample(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            seeds = [seeds_of(SEED, int(row), count) for row in self.prepared.index[at]]
            prompts = self.prompts(at)
            by_row = engine.sample(prompts, sampling, seeds)
            texts, log_probs, scores = [], [], []
            for prompt, of_row in zip(prompts, by_row, strict=True):
                texts.append([answer_texts(one.completion, prompt, engine)[0] for one in of_row])
                log_probs.append([one.log_prob.mean() for one in of_row])
                scores.append(eigen_score(np.stack([one.last[layer] for one in of_row])))
            return {
                "text": np.array(texts),
                "log_prob": np.array(log_probs),
                "eigenscore": np.array(scores),
            }

        of_samples = self.owner | {"samples": count, "sampling": asdict(sampling), "seed": SEED}
        folder, at_once = self.folder / "answers" / f"samples-{count}", max(1, AT_ONCE // count)
        found = _by_row(folder, of_samples, inputs.prompt_tokens, "samples", sample, at_once)
        groups = [
            clusters(text, said.tolist())
            for text, said in zip(inputs.text, found["text"], strict=True)
        ]
        weighed = zip(groups, found["log_prob"], strict=True)
        return {
            "right": self._share_right(found["text"]),
            "eigenscore": found["eigenscore"],
            "entropy": np.array([entropy_of(group) for group in groups]),
            "entropy_weighted": np.array(
                [entropy_of(group, log_prob) for group, log_prob in weighed]
            ),
        }

    def _share_right(self, said: NDArray[np.str_]) -> Floats:
        """Return the share of answers [n, samples] that are right, of those that belong to a class;
        NaN where none."""
        options, rows = self.prepared.rows.judge, self.prepared.rows.dataset.rows
        judge, shares = make_judge(options), np.full(len(said), np.nan)
        for place, (number, texts) in enumerate(
            zip(self.prepared.index.tolist(), said.tolist(), strict=True)
        ):
            row, (prompt,) = rows[number], self.prompts(np.array([place]))
            spoken = [spoken_behind(prompt, text, self.engine) for text in texts]
            verdicts = [
                verdict_on(one, row.question, row.answers, judge, options.abstains)
                for one in spoken
            ]
            if labels := [CLASSES[one] for one in verdicts if one in CLASSES]:
                shares[place] = float(np.mean(labels))
        return shares


def _by_row(
    folder: Path,
    owner: Mapping[str, Any],
    lengths: NDArray[np.integer],
    name: str,
    make: Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]],
    at_once: int = AT_ONCE,
) -> dict[str, Any]:
    """Return arrays of all n rows, made in files of ``at_once`` of them, longest prompts first, or
    read from them."""
    claim(folder, dict(owner) | {"rows_in_a_file": at_once})
    plan = batches(lengths, at_once)
    parts = []
    with tqdm(total=len(lengths), desc=name, unit="row", mininterval=1) as bar:
        for number, rows in enumerate(plan):
            parts.append(kept(folder / f"{number:05d}.npz", partial(make, rows)))
            bar.update(len(rows))
    joined: dict[str, Any] = {}
    for key, values in list(parts[0].items()):
        joined[key] = np.empty(
            (len(lengths), *values.shape[1:]), np.result_type(*(part[key].dtype for part in parts))
        )
        for rows, part in zip(plan, parts, strict=True):
            joined[key][rows] = part.pop(key)  # some are gigabytes
    if bad := [
        key
        for key, values in joined.items()
        if values.dtype.kind == "f" and not np.isfinite(values).all()
    ]:
        raise EngineError(f"{name} hold a NaN or an infinity ({', '.join(bad)}): try another dtype")
    return joined


def _last(end: int) -> tuple[int, int]:
    return end - 1, end


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()
