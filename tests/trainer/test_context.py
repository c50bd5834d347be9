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

from probes_store.bundle import Bundle, check_golden
from probes_store.records import CONTEXT_SIGNALS
from service.data.forms import FORMS, chosen, families, in_forms
from service.data.forms.crossed import PLAIN_WORDING, WORDING
from service.data.training_rows import read_dataset
from service.engines.base import Completion, Sampling, TokenIds
from service.fitting.context import LEAST
from service.fitting.estimator import DepthMeanProbe
from service.fitting.nested_cv import CONTEXT_NAMES
from service.readout import Site
from service.scoring import Scorer
from service.trainer.new_rows import risks_of
from service.trainer.options import TrainOptions
from service.trainer.prepare import WITH_PASSAGE, PreparedData, fit_context, prepare, prompt_labels
from tests.data.test_forms import SAID, made
from tests.fitting.planted import PlantedEngine, planted_rows, write_rows
from tests.trainer.made import FUSED, Rows, run, served

QUESTIONS, OTHERS = 360, 120
WORDS = {
    "poem": (0, -2.0),
    "Context:": (1, 1.5),
    "states": (2, 1.5),
}  # head and strength of what a prompt is
QUICK: dict[str, Any] = {"signals": "depth_mean,first_token", "labels": "generate", "seeds": (0,)}


class ReadingEngine(PlantedEngine):
    """Readouts that also tell what a prompt is: a direction for each of ``WORDS``, added where the
    word is met."""

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        geometry, text = self.identity.geometry, self.detokenize(prompt)
        rng = np.random.default_rng(11)
        heads = rows.reshape(geometry.num_layers, geometry.heads(site), -1)
        for layer in range(geometry.num_layers):
            for word, (head, strength) in WORDS.items():
                direction = rng.standard_normal(heads.shape[-1])
                sign = strength if word in text else -strength
                heads[layer, head] += (1 + layer) * sign * direction / np.linalg.norm(direction)
        return rows

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        """Never a refusal, so that every row has a label."""
        said = ["Paris" if "known" in self.detokenize(prompt) else "Rome" for prompt in prompts]
        return [Completion(f"It is {city}.", (1, 2), "stop") for city in said]


def reading_rows(count: int = QUESTIONS, others: int = OTHERS, seed: int = 0) -> Rows:
    """Planted rows, of which two thirds show a passage and one third one that states the answer;
    and poems to write."""
    rows, rng = planted_rows(count, seed=seed), random.Random(seed)
    for number, row in enumerate(rows):
        if number % 3:
            fact = (
                "this states that it is Paris"
                if number % 3 == 1
                else "this tells of something else"
            )
            words = " ".join(
                "".join(rng.choices("abcdefgh", k=5)) for _ in range(12)
            )  # no two of them are alike
            row["prompt"] = f"Context: {fact}, {words}.\n\n{row['prompt']}"
    poems = [
        {
            "id": f"p{seed}-{number}",
            "prompt": f"Write a poem about tree {seed} {number}.",
            "applies": False,
        }
        for number in range(others)
    ]
    return [*rows, *poems]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return run(tmp_path_factory.mktemp("trained"), ReadingEngine(), reading_rows(), **QUICK)[0]


def prepared(folder: Path, rows: Rows, engine: PlantedEngine) -> PreparedData:
    data = read_dataset(write_rows(folder / "fresh.jsonl", rows), "generate", folds=None)
    options = TrainOptions(name="x", run_dir=folder / "new", labels="generate")
    return prepare(engine, data, options, "chat", "fresh", sites=[options.site], folds=None)


def fresh(folder: Path) -> tuple[Rows, PreparedData]:
    """Rows that no fit saw, prepared; every tenth is unlike everything in training."""
    rows = reading_rows(90, 0, seed=3)
    for row in rows[::10]:
        row["prompt"] += " strange"
    return rows, prepared(folder, rows, Strange())


class Strange(ReadingEngine):
    """Reads other numbers of prompts that end in this word."""

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        return rows * np.float32(2.5) if "strange" in self.detokenize(prompt) else rows


def test_the_bundle_has_the_probes_that_its_rows_allow(trained: Bundle) -> None:
    manifest, context = trained.manifest, trained.manifest.context
    assert context is not None
    assert (manifest.format_version, manifest.signals) == (1, (*FUSED, "passage", "stated"))
    asks, passage, stated = context.probes
    assert [probe.name for probe in context.probes] == ["asks", "passage", "stated"]
    assert (asks.rows, asks.positive) == (QUESTIONS + OTHERS, QUESTIONS)
    assert (passage.rows, passage.positive) == (QUESTIONS, 2 * QUESTIONS // 3)
    assert (stated.rows, stated.positive) == (2 * QUESTIONS // 3, QUESTIONS // 3)
    assert min(probe.auroc for probe in context.probes) > 0.95
    assert trained.probes.context_head is not None
    assert [set(row) for row in trained.probes.context_head.tolist()] == [
        {head} for head, _ in WORDS.values()
    ]
    assert len(manifest.classifier.weight) == 5


def test_applicability_and_evaluation_are_of_rows_out_of_fold(trained: Bundle) -> None:
    evaluation, context = trained.evaluation(), trained.manifest.context
    assert context is not None
    found = context.applicability
    assert found is not None
    assert 0 < found.threshold <= 0.5
    assert found.questions_below <= 0.01 + 1 / QUESTIONS
    assert found.others_above < 0.1
    assert f"{found.questions_below:.1%} of {QUESTIONS} training questions" in found.statement
    assert f"of {OTHERS} other prompts" in found.statement
    assert evaluation["context"] == {
        probe.name: {"auroc": pytest.approx(probe.auroc, abs=1e-6), "rows": probe.rows}
        for probe in context.probes
    }
    assert evaluation["signal_of_the_bundle"] == "fused_context_unit_norm"
    assert set(CONTEXT_NAMES) <= set(evaluation["cross_validation"]["signals"])
    assert evaluation["data"]["others"] == OTHERS


def test_the_reference_sees_all_logits_and_all_prompts(trained: Bundle) -> None:
    uncertainty, probes = trained.manifest.uncertainty, trained.probes
    assert uncertainty is not None
    assert uncertainty.outside_rows == QUESTIONS + OTHERS
    assert probes.reference_mean is not None
    assert probes.reference_whitening is not None
    assert probes.reference_mean.shape == (trained.manifest.logits,) == (16,)
    poems = [row for row in reading_rows(2, 300, seed=5) if not row.get("applies", True)]
    reports = served(trained, poems, ReadingEngine())
    assert (
        np.mean([report.uncertain is not None and report.uncertain.outside for report in reports])
        < 0.05
    )


def test_what_is_served_is_what_training_computed(trained: Bundle, tmp_path: Path) -> None:
    engine = ReadingEngine()
    scorer = Scorer(engine, trained)  # replays the golden prompts
    onsets = engine.score(trained.golden.prompts(), scorer.probes, first_token=True)
    logits = np.stack([np.concatenate(onset.trajectories) for onset in onsets])
    check_golden(trained, logits, trained.golden.risk, dtype="float32")
    assert trained.golden.risk[-1] - trained.golden.risk[0] > 0.5
    rows, data = fresh(tmp_path)
    assert [row["id"] for row in rows] == [row.id for row in data.dataset.rows]
    reports = served(trained, rows, Strange())
    plain, withheld = risks_of(trained, data), risks_of(trained, data, as_gated=True)
    np.testing.assert_allclose(plain, [report.risk for report in reports], atol=1e-6)
    outside = np.array(
        [report.uncertain is not None and report.uncertain.outside for report in reports]
    )
    for number, report in enumerate(reports):
        if not outside[number]:
            assert report.context.passage is not None
            assert (report.context.passage > 0.5) == bool(number % 3), number
            assert report.context.applies
    # Rows outside count as withheld, and no others.
    assert outside[::10].all()
    assert 9 <= outside.sum() < 20
    assert np.all(withheld[outside] == 1.0)
    assert np.array_equal(withheld[~outside], plain[~outside])
    assert np.any(plain[outside] < 0.9)


def test_requests_that_ask_for_no_fact_do_not_apply_when_served(trained: Bundle) -> None:
    rows = reading_rows(300, 100, seed=4)
    reports = served(trained, rows, ReadingEngine())
    asking = np.array([row.get("applies", True) for row in rows])
    applies = np.array([report.context.applies for report in reports])
    assert applies[asking].all()
    context = trained.manifest.context
    asks = np.array([report.context.asks for report in reports], np.float64)
    assert context is not None
    assert context.applicability is not None
    assert (asks[asking] >= context.applicability.threshold).mean() > 0.96
    assert (asks[~asking] < context.applicability.threshold).mean() > 0.9
    assert np.array_equal(
        applies[~asking], asks[~asking] >= context.applicability.threshold
    )  # poems to write: tasks


def in_other_words(groups: int) -> Rows:
    """Return questions in other words, alone and behind another turn, of so many groups each; plain
    ones; and poems."""
    count = 2 * groups
    asked = planted_rows(2 * count + 20, seed=6)
    before = [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello! Ask me anything."},
    ]
    for number, row in enumerate(asked):
        row["form"] = PLAIN_WORDING if count <= number < count + 20 else f"{WORDING}bait"
        if number % 10 == 0:
            row["prompt"] += " about a poem"  # looks like a request that asks for no fact
        if number >= count + 20:
            row["messages"] = [*before, {"role": "user", "content": row.pop("prompt")}]
    return [*asked, *reading_rows(1, 60)[1:]]


@pytest.mark.parametrize("groups", [LEAST, LEAST - 1])
def test_lone_questions_set_the_limit_where_enough_are_in_other_words(
    tmp_path: Path, groups: int
) -> None:
    rows = in_other_words(groups)
    data = prepared(tmp_path, rows, ReadingEngine())
    context = fit_context(data, DepthMeanProbe(0.3, folds=2, seeds=(0,)))
    assert context is not None
    applicability = context.record().applicability
    assert applicability is not None
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


def test_without_such_rows_a_bundle_has_none_and_its_former_version(tmp_path: Path) -> None:
    for name, rows in (
        ("plain", planted_rows(240)),
        ("few", [*planted_rows(240), *reading_rows(1, 39)[1:]]),  # one less than a probe needs
    ):
        bundle, _ = run(tmp_path / name, ReadingEngine(), rows, **QUICK | {"evaluate": False})
        manifest = bundle.manifest
        assert (manifest.context, manifest.signals) == (None, FUSED)
        assert "context" not in bundle.evaluation()
        assert bundle.probes.context_head is None
        data = prepared(tmp_path / name, planted_rows(240), ReadingEngine())
        assert np.array_equal(risks_of(bundle, data, as_gated=True), risks_of(bundle, data))


PASSAGES = reading_rows(360, 0)
LABELLED = [row | {"label": number % 2} for number, row in enumerate(PASSAGES)]


@pytest.mark.parametrize(
    ("rows", "labels", "names"),
    [
        ([*planted_rows(240), *reading_rows(1, 60)[1:]], "generate", ["asks"]),
        (PASSAGES, "generate", ["passage", "stated"]),
        (LABELLED, "given", ["passage", "stated"]),
    ],
)
def test_each_kind_of_row_brings_its_own_probes(
    tmp_path: Path, rows: Rows, labels: str, names: list[str]
) -> None:
    manifest = run(
        tmp_path, ReadingEngine(), rows, **QUICK | {"evaluate": False, "labels": labels}
    )[0].manifest
    assert manifest.context is not None
    assert [probe.name for probe in manifest.context.probes] == names
    assert manifest.signals == (*FUSED, *(names if "passage" in names else ()))
    assert (manifest.context.applicability is None) == ("asks" not in names)


class Overlooking(ReadingEngine):
    """What a long prompt states, it does not find."""

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        found = super().generate(prompts, sampling)
        lost = ["states" in self.detokenize(prompt) and len(prompt) > 300 for prompt in prompts]
        return [
            replace(one, text="It is Rome.") if far else one
            for one, far in zip(found, lost, strict=True)
        ]


def lengthened(rows: Rows) -> Rows:
    """Every second passage a page long."""
    more = " ".join(f"word{n}" for n in range(38))
    found = []
    for number, row in enumerate(rows):
        head, _, words = row["prompt"].partition(", ")
        short = f"{head}, {words[50:]}" if "Context:" in head else row["prompt"]
        found.append(
            row
            | {
                "prompt": row["prompt"].replace("Context:", f"Context: {more}")
                if number % 2
                else short
            }
        )
    return found


def test_where_passages_differ_in_length_the_classifier_reads_it(tmp_path: Path) -> None:
    bundle, _ = run(
        tmp_path, Overlooking(), lengthened(reading_rows()), **QUICK | {"evaluate": False}
    )
    assert bundle.manifest.signals == (*FUSED, *CONTEXT_SIGNALS)
    assert (
        bundle.manifest.classifier.weight[-1] < 0
    )  # for being right, of each e-fold of its tokens
    assert bundle.evaluation()["signal_of_the_bundle"] == "fused_context_unit_norm"
    rows = lengthened(reading_rows(60, 0, seed=3))
    data = prepared(tmp_path, rows, Overlooking())
    risks = np.array([report.risk for report in served(bundle, rows, Overlooking())])
    np.testing.assert_allclose(risks_of(bundle, data), risks, atol=1e-6)
    stated = np.array(["states" in row["prompt"] for row in rows])
    long = np.array(["word37" in row["prompt"] for row in rows])
    assert risks[stated & long].mean() > risks[stated & ~long].mean() + 0.2


class Constant(ReadingEngine):
    """One layer reads the same of every prompt with a passage."""

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        if "Context:" in self.detokenize(prompt):
            rows[2] = 3.0
        return rows


def test_a_probe_without_a_direction_in_some_layer_is_not_published(tmp_path: Path) -> None:
    bundle, _ = run(tmp_path, Constant(), reading_rows(), **QUICK | {"evaluate": False})
    context = bundle.manifest.context
    assert context is not None
    assert [probe.name for probe in context.probes] == ["asks"]
    assert bundle.evaluation()["signal_of_the_bundle"] == "fused_unit_norm"


@pytest.mark.parametrize("family", families())
def test_labels_of_each_family_of_forms(tmp_path: Path, family: str) -> None:
    rows = [
        row for form in chosen([family]) for row in in_forms(made(), [form], model_answers=SAID)
    ]
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "generate", folds=None)
    found = prompt_labels(dataset, np.arange(len(rows)), np.full(len(rows), 9))
    assert found.passage.tolist() == [family in WITH_PASSAGE] * len(rows)
    for row, stated in zip(rows, found.stated.tolist(), strict=True):
        text = "\n".join(message["content"] for message in row["messages"])
        own = re.search(rf"\b{row['answers'][0]}\b", text) is not None
        assert stated == (own and family in WITH_PASSAGE), row["form"]
    forms = np.array([row["form"] for row in rows])
    by_form = {name: found.stated[forms == name] for name in set(forms.tolist())}
    for name, share in {
        "passage_right": (1, 1),
        "passage_unrelated": (0, 0),
        "passage_contradicting": (0, 0),
        "passages_several": (0.2, 0.8),
        "context_1k": (0.2, 0.8),
    }.items():
        if name in by_form:
            assert share[0] <= by_form[name].mean() <= share[1], name
    assert set(by_form) == {name for name, form in FORMS.items() if form.family == family}


def test_rows_without_a_form_are_told_by_their_shape(tmp_path: Path) -> None:
    passage = "Context: It rains in Oslo. Anna lives in Rome.\n\nWhere does Anna live?"
    rows: Rows = [
        {"prompt": passage, "answers": ["Rome"]},
        {"prompt": passage, "answers": ["Paris"]},
        {"prompt": "Is Rome or Milan older?", "answers": ["Rome"]},  # stated, but by no passage
        {"prompt": passage, "answers": ["Rom"]},  # whole words only
        {
            "messages": [
                {"role": "system", "content": "The answer is Oslo."},
                {"role": "user", "content": passage},
            ],
            "answers": ["Oslo"],
        },
        {
            "messages": [
                {"role": "user", "content": passage},
                {"role": "assistant", "content": "Rome."},
                {"role": "user", "content": "And who is Anna?"},
            ],
            "answers": ["Rome"],
        },
        {
            "prompt": passage,
            "answers": ["Rome"],
            "form": "lone",
        },  # what the form says goes before the shape
    ]
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "generate", folds=None)
    found = prompt_labels(dataset, np.arange(len(rows)), np.full(len(rows), 9))
    assert found.passage.tolist() == [True, True, False, True, True, False, False]
    assert found.stated.tolist() == [True, False, False, False, True, False, False]
    some = prompt_labels(dataset, np.array([4, 1]), np.array([30, 20]))
    assert (some.passage.tolist(), some.stated.tolist()) == ([True, True], [True, False])
    assert some.tokens.tolist() == [30, 20]
