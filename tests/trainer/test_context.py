"""Training on prompts of every kind: the bundle tells which ask for a fact, which show a passage,
which state it."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.records import CONTEXT_SIGNALS
from service.data.forms import FORMS, chosen, families, in_forms
from service.data.forms.crossed import PLAIN_WORDING, WORDING
from service.data.training_rows import Dataset, read_dataset
from service.engines.base import Completion, Sampling, TokenIds
from service.fitting.context import LEAST, PromptLabels
from service.fitting.estimator import DepthMeanProbe
from service.fitting.nested_cv import CONTEXT_NAMES
from service.readout import Site
from service.scoring import RiskReport
from service.trainer.new_rows import risks_of
from service.trainer.options import TrainOptions
from service.trainer.prepare import WITH_PASSAGE, PreparedData, fit_context, prepare, prompt_labels
from tests.data.test_forms import SAID, made
from tests.fitting.planted import GEOMETRY, PlantedEngine, dataset_of, planted_rows
from tests.kit.chats import turns
from tests.kit.present import present
from tests.kit.rows import Options, Row, Rows
from tests.trainer.made import FUSED, options_on, run, served, trained_once

QUESTIONS, OTHERS = 360, 120
# Head and strength of what a prompt is.
WORDS = {"poem": (0, -2.0), "Context:": (1, 1.5), "states": (2, 1.5)}
DIRECTIONS = np.random.default_rng(11).standard_normal((3, GEOMETRY.num_layers, GEOMETRY.head_dim))
DIRECTIONS /= np.linalg.norm(DIRECTIONS, axis=2, keepdims=True)
QUICK: Options = {"signals": "depth_mean,first_token", "labels": "generate", "seeds": (0,)}


class ReadingEngine(PlantedEngine):
    """Readouts that also tell what a prompt is: a direction for each of ``WORDS``, added where the
    word is met."""

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        geometry, text = self.identity.geometry, self.detokenize(prompt)
        heads = rows.reshape(geometry.num_layers, geometry.heads(site), -1)
        louder = np.arange(1, geometry.num_layers + 1)[:, None]
        for (word, (head, strength)), direction in zip(WORDS.items(), DIRECTIONS, strict=True):
            heads[:, head] += louder * (strength if word in text else -strength) * direction
        return rows

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        """Never a refusal, so that every row has a label."""
        said = ["Paris" if "known" in self.detokenize(prompt) else "Rome" for prompt in prompts]
        return [Completion(f"It is {city}.", (1, 2), "stop") for city in said]


def reading_rows(count: int = QUESTIONS, others: int = OTHERS, seed: int = 0) -> Rows:
    """Planted rows, of which two thirds show a passage and one third one that states the answer;
    and poems to write."""
    rows, rng = planted_rows(count, seed=seed), random.Random(seed)
    facts = ("", "this states that it is Paris", "this tells of something else")
    for number, row in enumerate(rows):
        if fact := facts[number % 3]:
            # No two passages are alike.
            words = " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(12))
            row["prompt"] = f"Context: {fact}, {words}.\n\n{row['prompt']}"
    return rows + poems(others, seed)


def poems(count: int, seed: int = 1) -> Rows:
    texts = [f"Write a poem about tree {seed} {number}." for number in range(count)]
    return [{"prompt": text, "applies": False} for text in texts]


trained = trained_once(ReadingEngine, reading_rows(), **QUICK)


def prepared(folder: Path, rows: Rows, engine: PlantedEngine) -> PreparedData:
    options = options_on(TrainOptions, folder, rows, name="x", labels="generate")
    data = read_dataset(options.file, "generate", folds=None)
    return prepare(engine, data, options, "chat", "fresh", sites=[options.site], folds=None)


class Strange(ReadingEngine):
    """Reads other numbers of prompts that end in this word."""

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        return rows * np.float32(2.5) if "strange" in self.detokenize(prompt) else rows


def outside(reports: list[RiskReport]) -> NDArray[np.bool_]:
    return np.array([report.uncertain.outside for report in reports])


class Constant(ReadingEngine):
    """One layer reads the same of every prompt with a passage."""

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        if "Context:" in self.detokenize(prompt):
            rows[2] = 3.0
        return rows


def test_the_bundle_has_the_probes_that_its_rows_allow(trained: Bundle) -> None:
    manifest, context = trained.manifest, present(trained.manifest.context)
    assert (manifest.format_version, manifest.signals) == (1, (*FUSED, "passage", "stated"))
    assert [(probe.name, probe.rows, probe.positive) for probe in context.probes] == [
        ("asks", QUESTIONS + OTHERS, QUESTIONS),
        ("passage", QUESTIONS, 2 * QUESTIONS // 3),
        ("stated", 2 * QUESTIONS // 3, QUESTIONS // 3),
    ]
    assert min(probe.auroc for probe in context.probes) > 0.95
    heads = [set(row) for row in present(trained.probes.context_head).tolist()]
    assert heads == [{head} for head, _ in WORDS.values()]
    assert len(manifest.classifier.weight) == 5


def test_applicability_and_evaluation_are_of_rows_out_of_fold(trained: Bundle) -> None:
    evaluation, context = trained.evaluation(), present(trained.manifest.context)
    applies = present(context.applicability)
    assert 0 < applies.threshold <= 0.5
    assert applies.questions_below <= 0.01 + 1 / QUESTIONS
    assert applies.others_above < 0.1
    assert f"{applies.questions_below:.1%} of {QUESTIONS} training questions" in applies.statement
    assert f"of {OTHERS} other prompts" in applies.statement
    assert evaluation["context"] == {
        probe.name: {"auroc": pytest.approx(probe.auroc, abs=1e-6), "rows": probe.rows}
        for probe in context.probes
    }
    assert evaluation["signal_of_the_bundle"] == "fused_context_unit_norm"
    assert set(CONTEXT_NAMES) <= set(evaluation["cross_validation"]["signals"])
    assert evaluation["data"]["others"] == OTHERS


def test_the_reference_sees_all_logits_and_all_prompts(trained: Bundle) -> None:
    uncertainty, probes = trained.manifest.uncertainty, trained.probes
    assert uncertainty.outside_rows == QUESTIONS + OTHERS
    assert probes.reference_mean.shape == (trained.manifest.logits,) == (16,)
    assert outside(served(trained, poems(300, seed=5), ReadingEngine())).mean() < 0.05


def test_what_is_served_is_what_training_computed(trained: Bundle, tmp_path: Path) -> None:
    assert trained.golden.risk[-1] - trained.golden.risk[0] > 0.5
    # Rows that no fit saw, of which every tenth is unlike everything in training.
    rows = reading_rows(90, 0, seed=3)
    for row in rows[::10]:
        row["prompt"] += " strange"
    # Serving replays the golden prompts first.
    data, reports = prepared(tmp_path, rows, Strange()), served(trained, rows, Strange())
    assert [row["id"] for row in rows] == [row.id for row in data.dataset.rows]
    plain, withheld = risks_of(trained, data), risks_of(trained, data, as_gated=True)
    np.testing.assert_allclose(plain, [report.risk for report in reports], atol=1e-6)
    away = outside(reports)
    for number in np.flatnonzero(~away).tolist():
        context = reports[number].context
        assert (present(context.passage) > 0.5) == bool(number % 3), number
        assert context.applies
    # Rows outside count as withheld, and no others.
    assert away[::10].all()
    assert 9 <= away.sum() < 20
    assert np.all(withheld[away] == 1.0)
    assert np.array_equal(withheld[~away], plain[~away])
    assert np.any(plain[away] < 0.9)


def test_requests_that_ask_for_no_fact_do_not_apply_when_served(trained: Bundle) -> None:
    reports = served(trained, reading_rows(300, 100, seed=4), ReadingEngine())
    limit = present(present(trained.manifest.context).applicability).threshold
    applies = np.array([report.context.applies for report in reports])
    asks = np.array([report.context.asks for report in reports], np.float64)
    above = asks >= limit
    assert applies[:300].all()
    assert above[:300].mean() > 0.96
    assert above[300:].mean() < 0.1
    assert np.array_equal(applies[300:], above[300:])  # poems to write: tasks


def in_other_words(groups: int) -> Rows:
    """Return questions in other words, alone and behind another turn, of so many groups each; plain
    ones; and poems."""
    count = 2 * groups
    asked = planted_rows(2 * count + 20, seed=6)
    for number, row in enumerate(asked):
        row["form"] = PLAIN_WORDING if count <= number < count + 20 else f"{WORDING}bait"
        if number % 10 == 0:
            row["prompt"] += " about a poem"  # looks like a request that asks for no fact
        if number >= count + 20:
            row["messages"] = turns("Hi!", "Hello! Ask me anything.", row.pop("prompt"))
    return asked + poems(60)


# As labels from the model's answers, one seed, two folds.
PROBE = DepthMeanProbe(0.3, folds=2, seeds=(0,))


@pytest.mark.parametrize("groups", [LEAST, LEAST - 1])
def test_lone_questions_set_the_limit_where_enough_are_in_other_words(
    tmp_path: Path, groups: int
) -> None:
    rows = in_other_words(groups)
    data = prepared(tmp_path, rows, ReadingEngine())
    context = present(fit_context(data, PROBE))
    applicability = present(context.record().applicability)
    asks = context.fits[0].probability[: context.labelled]
    alone = np.array(["prompt" in rows[index] for index in data.labelled.index.tolist()])
    assert np.array_equal(context.alone, alone)
    # A question behind another turn neither counts as one in other words nor sets the limit: one in
    # a thousand of the lone ones falls below it. With one group too few, three in a thousand of all
    # questions do.
    enough = groups == LEAST
    assert context.reworded == (2 * LEAST if enough else None)
    limit = np.quantile(asks[alone], 0.001) if enough else np.quantile(asks, 0.003)
    assert 1e-6 < limit < 0.5, "the limit is not one of the bounds that it is clipped to"
    assert applicability.threshold == pytest.approx(limit, rel=1e-12)
    assert applicability.questions_below == pytest.approx((asks < limit).mean())


@pytest.mark.parametrize(
    ("engine", "rows", "names"),
    [
        (ReadingEngine, planted_rows(240), []),
        (ReadingEngine, planted_rows(240) + poems(LEAST - 1), []),
        (ReadingEngine, planted_rows(240) + poems(LEAST), ["asks"]),
        # The probe of the passage would have no direction in one layer.
        (Constant, reading_rows(), ["asks"]),
    ],
)
def test_which_probes_the_rows_allow(
    tmp_path: Path, engine: type[ReadingEngine], rows: Rows, names: list[str]
) -> None:
    context = fit_context(prepared(tmp_path, rows, engine()), PROBE)
    assert (context is None) == (names == [])
    if context is not None:
        assert [fit.record.name for fit in context.fits] == names
        assert context.columns is None


PASSAGES = [row | {"label": number % 2} for number, row in enumerate(reading_rows(360, 0))]


@pytest.mark.parametrize(
    ("rows", "labels", "names"),
    [
        (planted_rows(240) + poems(60), "generate", ["asks"]),
        (PASSAGES, "given", ["passage", "stated"]),
    ],
)
def test_each_kind_of_row_brings_its_own_probes(
    tmp_path: Path, rows: Rows, labels: str, names: list[str]
) -> None:
    options = QUICK | {"evaluate": False, "labels": labels}
    manifest = run(tmp_path, ReadingEngine(), rows, **options)[0].manifest
    context = present(manifest.context)
    assert [probe.name for probe in context.probes] == names
    assert manifest.signals == (*FUSED, *(names if "passage" in names else ()))
    assert (context.applicability is None) == ("asks" not in names)


class Overlooking(ReadingEngine):
    """What a long prompt states, it does not find."""

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        answers = super().generate(prompts, sampling)
        for number, prompt in enumerate(prompts):
            if "states" in self.detokenize(prompt) and len(prompt) > 300:
                answers[number] = replace(answers[number], text="It is Rome.")
        return answers


def lengthened(rows: Rows) -> Rows:
    """Every second passage a page long, the others shorter."""
    page = " ".join(f"word{n}" for n in range(38))
    for number, row in enumerate(rows):
        head, _, words = row["prompt"].partition(", ")
        if "Context:" in head:
            short = f"{head}, {words[50:]}"
            row["prompt"] = (
                row["prompt"].replace("Context:", f"Context: {page}") if number % 2 else short
            )
    return rows


def test_where_passages_differ_in_length_the_classifier_reads_it(tmp_path: Path) -> None:
    options = QUICK | {"evaluate": False}
    bundle, _ = run(tmp_path, Overlooking(), lengthened(reading_rows()), **options)
    assert bundle.manifest.signals == (*FUSED, *CONTEXT_SIGNALS)
    # For being right, of each e-fold of its tokens.
    assert bundle.manifest.classifier.weight[-1] < 0
    assert bundle.evaluation()["signal_of_the_bundle"] == "fused_context_unit_norm"
    rows = lengthened(reading_rows(60, 0, seed=3))
    data = prepared(tmp_path / "fresh", rows, Overlooking())
    risks = np.array([report.risk for report in served(bundle, rows, Overlooking())])
    np.testing.assert_allclose(risks_of(bundle, data), risks, atol=1e-6)
    stated = np.array(["states" in row["prompt"] for row in rows])
    long = np.array(["word37" in row["prompt"] for row in rows])
    assert risks[stated & long].mean() > risks[stated & ~long].mean() + 0.2


@pytest.mark.parametrize("family", families())
def test_labels_of_each_family_of_forms(tmp_path: Path, family: str) -> None:
    rows: Rows = []
    for form in chosen([family]):
        rows += in_forms(made(), [form], model_answers=SAID)
    labels = labels_of(dataset_of(tmp_path, rows))
    beside = family in WITH_PASSAGE
    assert labels.passage.tolist() == [beside] * len(rows)
    for row, stated in zip(rows, labels.stated.tolist(), strict=True):
        text = "\n".join(message["content"] for message in row["messages"])
        own = re.search(rf"\b{row['answers'][0]}\b", text) is not None
        assert stated == (own and beside), row["form"]
    forms = np.array([row["form"] for row in rows])
    assert {*forms.tolist()} == {name for name, form in FORMS.items() if form.family == family}
    for name, low, high in (
        ("passage_right", 1, 1),
        ("passage_unrelated", 0, 0),
        ("passage_contradicting", 0, 0),
        ("passages_several", 0.2, 0.8),
        ("context_1k", 0.2, 0.8),
    ):
        if name in forms:
            assert low <= labels.stated[forms == name].mean() <= high, name


PLACES = "Context: It rains in Oslo. Anna lives in Rome.\n\nWhere does Anna live?"


def test_rows_without_a_form_are_told_by_their_shape(tmp_path: Path) -> None:
    cases: list[tuple[Row, str, bool, bool]] = [  # row, answer, has a passage, states the answer
        ({"prompt": PLACES}, "Rome", True, True),
        ({"prompt": PLACES}, "Paris", True, False),
        ({"prompt": "Is Rome or Milan older?"}, "Rome", False, False),  # stated by no passage
        ({"prompt": PLACES}, "Rom", True, False),  # whole words only
        ({"messages": turns(PLACES, system="The answer is Oslo.")}, "Oslo", True, True),
        ({"messages": turns(PLACES, "Rome.", "And who is Anna?")}, "Rome", False, False),
        ({"prompt": PLACES, "form": "lone"}, "Rome", False, False),  # goes before the shape
    ]
    rows = [row | {"answers": [answer]} for row, answer, *_ in cases]
    dataset = dataset_of(tmp_path, rows)
    labels = labels_of(dataset)
    assert labels.passage.tolist() == [passage for *_, passage, _ in cases]
    assert labels.stated.tolist() == [stated for *_, stated in cases]
    some = prompt_labels(dataset, np.array([4, 1]), np.array([30, 20]))
    assert (some.passage.tolist(), some.stated.tolist()) == ([True, True], [True, False])
    assert some.tokens.tolist() == [30, 20]


def labels_of(dataset: Dataset) -> PromptLabels:
    return prompt_labels(dataset, np.arange(len(dataset)), np.full(len(dataset), 9))
