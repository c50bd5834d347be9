"""What a run says of its bundle: the tables, the plots, the threshold's rule in words, and bundles
side by side."""

from __future__ import annotations

import dataclasses
import io
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image

from probes_store.bundle import Bundle, load_bundle
from probes_store.records import CONTEXT_SIGNALS
from probes_store.store import SHIPPED, Store
from service.errors import TrainingError
from service.fitting.decisions import at_threshold
from service.fitting.nested_cv import NAMES, Evaluation, Inputs
from service.fitting.scores import auroc_interval, mean_auroc, reliability
from service.judging.evaluation import coverage
from service.trainer.cards import (
    better_options,
    card_of,
    cell,
    cheaper_and_better,
    closing_lines,
    rule_in_words,
    summary_table,
    write_card,
)
from service.trainer.comparison import compare
from service.trainer.plots import PlotData, _coverage, _reliability, draw
from service.trainer.publish import by_stratum
from tests.command_line import hallutracer
from tests.fitting.made import labelled_inputs
from tests.fitting.planted import Quiet, planted_rows
from tests.kit.present import present
from tests.kit.rows import Document, Options
from tests.trainer.made import ONE, run, section, served, trained_once

QUICK: Options = {"seeds": (0,), "folds": 2}
OWN, FUSED = "depth_mean_unit_norm", "fused_unit_norm"


def made(noise: dict[str, float]) -> tuple[Inputs, Evaluation]:
    """Two test sides of 300 rows in groups of 3; a signal's noise decides how well it ranks."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(200), 3)
    label = (rng.normal(size=200)[group] + rng.normal(size=600) > 0).astype(np.int64)
    sides = np.array_split(np.arange(600), 2)
    tests, signals = {}, {}
    for name in NAMES:
        risk = -label + noise.get(name, 3.0) * rng.normal(size=600)
        tests[name] = [(side, risk[side]) for side in sides]
        low, high = auroc_interval(label, group, tests[name])
        mean = mean_auroc(label, tests[name])
        signals[name] = {
            "auroc": {"mean": mean, "low": low, "high": high},
            "ece": {"mean": 0.02},
            "calibration_debiased": {"mean": 0.01},
        }
    signals[OWN]["auroc_within_kind"] = {"mean": 0.678}
    return labelled_inputs(label, group), Evaluation({"signals": signals}, {}, tests)


def test_the_table_has_every_signal_and_marks_ours() -> None:
    _, nested = made({OWN: 1.0})
    signals = nested.document["signals"]
    lines = summary_table(signals, OWN).splitlines()
    assert len(lines) == 2 + len(NAMES)
    [ours] = [line for line in lines if "> depth mean, unit norm" in line]
    assert "0.678" in ours
    assert f"{signals[OWN]['auroc']['mean']:.3f} [" in ours
    assert "within kind" in lines[0]


CONTEXT, FUSED_CONTEXT = "context_unit_norm", "fused_context_unit_norm"
EQUAL = dict.fromkeys((OWN, FUSED, "depth_mean_standardized", "fused_standardized"), 1.5)


READING = dict.fromkeys(NAMES, 3.0) | {CONTEXT: 1.5, FUSED_CONTEXT: 0.8, FUSED: 0.8, OWN: 0.8}


FIRST_TOKEN_TOO = ["--logit-scale unit_norm --signals depth_mean,first_token"]


@pytest.mark.parametrize(
    ("noise", "own", "flags"),
    [
        (EQUAL | {FUSED: 0.8, "fused_standardized": 2.5}, OWN, FIRST_TOKEN_TOO),
        (EQUAL | {"depth_mean_joint": 0.8}, OWN, ["--logit-scale joint --signals depth_mean"]),
        (EQUAL | {FUSED: 0.8}, FUSED, []),
        (EQUAL, OWN, []),
        # The flags choose scale and first token only: what they publish reads the context where the
        # bundle does.
        (READING, CONTEXT, FIRST_TOKEN_TOO),
        (READING, FUSED_CONTEXT, []),
    ],
)
def test_a_gain_beyond_chance_is_recommended(
    noise: dict[str, float], own: str, flags: list[str]
) -> None:
    """That a run prints it: test_recommendation.py."""
    lines = better_options(*made(noise), own)
    assert [line.partition(" gains 0.")[0] for line in lines] == flags


def test_a_signal_without_probes_that_ranks_better_is_said_above_the_table() -> None:
    def signals(**auroc: float) -> Document:
        keys = ("auroc", "ece", "calibration_debiased")
        return {name: dict.fromkeys(keys, {"mean": v, "std": 0.1}) for name, v in auroc.items()}

    rows = signals(
        depth_mean_unit_norm=0.844, first_token_entropy=0.904, prompt_length=0.85, best_head=0.95
    )
    sentence = present(cheaper_and_better(rows, OWN))
    assert "first-token entropy" in sentence
    assert "0.904 against 0.844" in sentence
    evaluation = {"cross_validation": {"signals": rows}, "signal_of_the_bundle": OWN}
    lines = list(islice(closing_lines(evaluation), 3))
    assert lines[0] == sentence
    assert "0.904 +/- 0.100" in lines[2]  # without intervals the table is drawn, too
    worse = signals(depth_mean_unit_norm=0.844, first_token_entropy=0.84)
    assert cheaper_and_better(worse, OWN) is None
    assert cell({"mean": 0.5, "std": 0.1, "low": 0.4, "high": 0.6}) == "0.500 [0.400, 0.600]"


# Figures: there, small, and a function of the numbers alone.


def data(layers: int = 6, count: int = 500, seed: int = 0) -> PlotData:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, count)
    risk = 1 / (1 + np.exp(2.0 * label - 1 + rng.normal(size=count)))
    mean = np.stack([-np.linspace(0, 1, layers), np.linspace(0, 1, layers)])
    risks = {"depth mean": risk, "first-token probability": rng.random(count)}
    aurocs = 0.6 + 0.2 * rng.random((3, layers))
    group, deep = np.arange(count) // 2, np.array([0.8, 0.81, 0.79])
    return PlotData(
        label, group, risks, mean, np.ones_like(mean), aurocs, deep, "a unit", "depth mean", 0.5
    )


def test_figures_are_small_and_the_same_numbers_draw_the_same_bytes() -> None:
    plotted = data()
    figures, without_risks = draw(plotted), draw(dataclasses.replace(plotted, risk={}))
    assert figures == draw(plotted)
    names = ("coverage", "layers", "precision_recall", "reliability", "roc", "trajectories")
    assert sorted(figures) == [f"{name}.png" for name in names]
    assert list(without_risks) == ["layers.png", "trajectories.png"]
    for name, png in draw(data(96, 20000)).items():
        assert len(png) < 60_000, name
        image = Image.open(io.BytesIO(png))
        assert image.info.keys() <= {"dpi", "transparency"}
        assert min(image.size) > 300


def test_reliability_shows_the_bins_rows_and_the_bands_of_the_bundles_own_risk() -> None:
    plotted = data(count=600)

    def shown(**changes: Any) -> tuple[str, np.ndarray]:
        axes = Figure().add_subplot()
        _reliability(axes, dataclasses.replace(plotted, **changes))
        (bars,) = (drawn for drawn in axes.collections if isinstance(drawn, LineCollection))
        return axes.get_title(), np.array([segment[:, 1] for segment in bars.get_segments()])

    title, bands = shown()
    assert "15 bins of 40 rows" in title
    _, observed, _ = reliability(plotted.label, plotted.risk["depth mean"])
    assert bands.shape == (15, 2)
    assert np.all((bands[:, 0] <= observed) & (observed <= bands[:, 1]))
    (_, alone), (_, few) = (shown(group=np.arange(600) % size) for size in (600, 4))
    assert np.diff(alone).mean() < np.diff(few).mean()  # rows of few groups tell less
    rounded = {"depth mean": np.round(plotted.risk["depth mean"] * 2) / 2}
    assert "3 bins of " in shown(risk=rounded)[0]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 1e-9])
def test_the_curve_of_coverage_shows_the_chosen_point(threshold: float) -> None:
    plotted, axes = dataclasses.replace(data(), threshold=threshold), Figure().add_subplot()
    _coverage(axes, plotted)
    gate = at_threshold(plotted.label, plotted.risk["depth mean"], threshold)
    points = [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]
    expected = [[gate["answered"], gate["wrong_among_answered"]]] if gate["answered"] else []
    assert [np.asarray(point)[0].tolist() for point in points] == expected
    label = f"the bundle's threshold, {threshold:.3f}" + ("" if expected else ", answers nothing")
    assert label in [str(line.get_label()) for line in axes.lines]


# The rule of a threshold through a whole run: manifest, evaluation.json, card, plot and console say
# the same.


# By another cost than the default; its rows name their forms.
careful = trained_once(
    rows=[row | {"form": ("lone", "chat")[at % 2]} for at, row in enumerate(planted_rows(240))],
    test=planted_rows(90, seed=3),
    wrong_costs=4.0,
    **QUICK,
)
# Every fifth label is turned, so that some of the surest answers are wrong.
missed = trained_once(
    rows=[
        row | {"label": 1 - row["label"] if at % 5 == 0 else row["label"]}
        for at, row in enumerate(planted_rows(240))
    ],
    target="wrong<=0.01",
    console=True,
    **QUICK,
)


def test_by_default_what_is_more_likely_right_than_wrong_is_answered(
    quick: tuple[Bundle, Quiet],
) -> None:
    bundle, console = quick
    record = bundle.evaluation()["threshold"]
    assert bundle.manifest.threshold == record["threshold"] == 0.5
    assert (record["rule"], record["wrong_costs"]) == ("wrong_costs", 1.0)
    for text in (section(bundle, "Threshold"), " ".join(console.lines)):
        assert "hreshold 0.5000 = 1 / (1 + K) with K = 1" in text
        assert "answer what is more likely right than wrong" in text


def test_another_cost_moves_the_threshold_and_every_figure_at_it(careful: Bundle) -> None:
    evaluation, text = careful.evaluation(), section(careful, "Threshold")
    assert careful.manifest.threshold == 0.2
    assert "with K = 4" in text
    assert "more likely right" not in text
    crossed = evaluation["cross_validation"]
    rows = {row["wrong_costs"]: row for row in crossed["by_wrong_costs"]}
    saved, by_withholding = (rows[4].pop(name) for name in ("net_benefit", "withholding_all"))
    assert rows[4] == {"wrong_costs": 4, "threshold": 0.2} | crossed["at_threshold"]
    share = evaluation["data"]["hallucinated"] / 240
    assert saved > by_withholding == pytest.approx(share - (1 - share) / 4, abs=1e-6)
    assert rows[4]["answered"] < rows[1]["answered"]
    risk = np.array([report.risk for report in served(careful, planted_rows(90, seed=3))])
    held_out = evaluation["held_out"]["at_threshold"]
    assert held_out["answered"] == pytest.approx(np.mean(risk < 0.2), abs=1e-6)
    own = present(coverage(careful).own)
    assert (own.threshold, own.answered) == (0.2, crossed["at_threshold"]["answered"])


def test_the_card_has_tables_of_costs_and_forms(careful: Bundle) -> None:
    card, evaluation = careful.card(), careful.evaluation()
    sentence = present(SENTENCE.search(card))
    assert (FIRST_TOKEN in sentence[1]) is careful.manifest.needs_first_token
    crossed = evaluation["cross_validation"]
    assert [row["threshold"] for row in crossed["by_wrong_costs"]] == pytest.approx(
        [1 / (1 + cost) for cost in (0.25, 0.5, 1, 2, 4)], abs=1e-6
    )
    for row in crossed["by_wrong_costs"]:
        cost = f"| {row['wrong_costs']:g} | {row['threshold']:.3f} |"
        shares = (row[name] for name in ("answered", "wrong_among_answered", "right_withheld"))
        shown = " | ".join(f"{share:.1%}" for share in shares)
        gains = f"{row['net_benefit']:+.3f} | {row['withholding_all']:+.3f} |"
        assert f"\n{cost} {shown} | {gains}\n" in card
    own = crossed["signals"][OWN]
    for title, key in (("E-AURC", "e_aurc"), ("caught at 10 %", "caught_at_10")):
        heads = (line for line in card.splitlines() if re.match(rf"\| signal.*{title}", line))
        table = card.partition(next(heads))[2].partition("\n\n")[0]
        assert f"{own[key]['mean']:.3f} +/-" in table
    assert "coverage.png" in card
    forms = crossed["by_form"]
    assert {name: row["rows"] for name, row in forms.items()} == {"chat": 120, "lone": 120}
    wrong = np.mean([row["wrong"] for row in forms.values()])
    assert wrong == pytest.approx(evaluation["data"]["hallucinated"] / 240)
    assert own["auroc_within_form"]["mean"] > 0.7
    lone = f"{forms['lone']['wrong']:.3f} | {forms['lone']['mean_risk']:.3f} |"
    assert f"| `lone` | 120 | {lone}" in card
    assert "within form" in card


def card_with(bundle: Bundle, evaluation: Document) -> str:
    """The bundle's card, had it been evaluated so; in one line."""
    deviations = [1.0] * len(bundle.manifest.signals)
    card = write_card(bundle.manifest, evaluation, signal_std=deviations, left_out={}, plots=[])
    return " ".join(card.split())


@pytest.mark.parametrize("target", ["wrong<=0.2", "answered>=0.5"])
def test_a_target_that_is_reached(missed: tuple[Bundle, Quiet], target: str) -> None:
    """Which threshold that is: tests/fitting/test_thresholds.py."""
    evaluation = missed[0].evaluation()
    evaluation["threshold"] |= {"target": target, "reached": True}
    record = evaluation["threshold"]
    card, answered = card_with(missed[0], evaluation), record["out_of_fold"]["answered"]
    for text in (card, rule_in_words(record)):
        assert f"for the target {target}: it answers {answered:.1%}" in text
        assert "out of reach" not in text
    assert "**Threshold" not in card
    assert "it is no guarantee" in card


def test_a_target_out_of_reach_is_said_so_and_does_not_open_the_gate(
    missed: tuple[Bundle, Quiet],
) -> None:
    bundle, console = missed
    record = bundle.evaluation()["threshold"]
    gate = record["out_of_fold"]
    assert (record["reached"], record["threshold"]) == (False, bundle.manifest.threshold)
    assert gate["wrong_among_answered"] > 0.01
    assert gate["answered"] < 0.5
    for row in bundle.evaluation()["cross_validation"]["by_wrong_costs"][:3]:
        assert gate["wrong_among_answered"] < row["wrong_among_answered"]
    words = (
        "he target wrong<=0.01 is out of reach. What is reachable is the lowest share of wrong"
        f" with at least 20 answered rows: threshold {record['threshold']:.4f}, which was"
        f" published, answers {gate['answered']:.1%} of the training rows by out-of-fold risks, and"
        f" {gate['wrong_among_answered']:.1%} of these answers are wrong"
    )
    assert f"t{words}" in console.lines
    assert f"**T{words}.**" in section(bundle, "Threshold")
    answers = rule_in_words(record | {"target": "answered>=1"})
    assert "What is reachable is the largest share answered" in answers


def test_too_few_rows_for_a_target_publish_nothing(tmp_path: Path) -> None:
    few = ONE | {"allow_few": True, "target": "wrong<=0.2"}
    with pytest.raises(
        TrainingError, match="20 answered rows, and there are 18 .*--wrong-costs"
    ) as caught:
        run(tmp_path, rows=planted_rows(18), **few)
    assert caught.value.param == "target"
    assert not (tmp_path / "store" / "planted").exists()


def test_a_gate_that_answers_nothing_says_so(missed: tuple[Bundle, Quiet]) -> None:
    evaluation = missed[0].evaluation()
    crossed = evaluation["cross_validation"]
    nothing = {"answered": 0.0, "wrong_among_answered": 0.0, "right_withheld": 1.0}
    crossed["at_threshold"] = nothing
    crossed["by_wrong_costs"][-1] |= nothing
    card = card_with(missed[0], evaluation)
    assert "**no prompt is answered**" in card
    assert "| 4 | 0.200 | 0.0% | - | 100.0% |" in card


# The table by form of conversation.

LABEL = np.array([0, 0, 1, 1, 0, 0])
RISK = np.array([[0.9, 0.4, 0.3, 0.6, 0.2, 0.8], [0.7, 0.2, 0.1, 0.4, 0.2, 0.6]])
FORMS = [{"form": name} for name in ("lone", "lone", "lone", "lone", "turns", "turns")]


def test_each_form_has_its_own_row() -> None:
    lone, turns = (rows := by_stratum(LABEL, RISK, FORMS, 0.5)).values()
    assert list(rows) == ["lone", "turns"]
    assert (lone["rows"], lone["wrong"], lone["mean_risk"]) == (4, 0.5, pytest.approx(0.45))
    assert lone["auroc"] == pytest.approx(0.75)  # in each seed: 3 of the 4 pairs in their order
    assert lone["answered"] == pytest.approx(5 / 8)
    assert lone["wrong_among_answered"] == pytest.approx(2 / 5)  # .4 and .2 of .4 .3 .2 .1 .4
    assert lone["mean_risk_among_answered"] == pytest.approx(0.28)
    assert (turns["auroc"], turns["wrong"], turns["answered"]) == (None, 1.0, 0.5)
    closed = by_stratum(LABEL, RISK, FORMS, 0.05)["lone"]
    assert (closed["answered"], closed["wrong_among_answered"]) == (0, None)
    assert by_stratum(LABEL, RISK, [*FORMS[:-1], {}], 0.5) == {}  # a row that names no form


# Bundles side by side.


def test_bundles_beside_each_other(careful: Bundle, quick: tuple[Bundle, Quiet]) -> None:
    def cells(bundles: list[Any], name: str) -> list[str]:
        table = compare(bundles).markdown.splitlines()
        [line] = [line for line in table if line.startswith(f"| {name} |")]
        return [shown.strip() for shown in line.strip("|").split("|")][1:]

    store = Store(SHIPPED)
    demo, demo_fused, plain, fused = (
        store.load(name) for name in ("demo", "demo-fused", "smollm2", "smollm2-fused")
    )
    evaluation = plain.evaluation()
    own = evaluation["cross_validation"]["signals"][evaluation["signal_of_the_bundle"]]["auroc"]
    shown = cells([plain, fused], "nested CV: AUROC")
    assert shown[0] == f"{own['mean']:.3f} [{own['low']:.3f}, {own['high']:.3f}]"
    assert len(set(cells([plain, fused], "signal"))) == 2
    assert len(compare([plain, fused]).caveats) == 1
    held = [b.evaluation()["held_out"]["signals"]["bundle"]["auroc"] for b in (demo, demo_fused)]
    assert cells([demo, demo_fused], "held out: AUROC") == [f"{auroc:.3f}" for auroc in held]
    caveats = " ".join(compare([demo, plain]).caveats)
    assert "different models" in caveats
    assert "trained on different rows" in caveats
    bare, _ = quick  # trained without an evaluation
    assert cells([bare, plain], "nested CV: AUROC") == ["-", shown[0]]
    assert cells([bare, careful], "threshold") == ["0.5000", "0.2000"]


def test_the_command_that_compares() -> None:
    done = hallutracer("bundle", "compare", "demo", "demo-fused")
    assert done.returncode == 0, done.stderr
    assert "| demo:1 | demo-fused:1 |" in done.stdout
    assert "not of the difference" in done.stderr
    assert hallutracer("bundle", "compare", "demo").returncode == 2


SENTENCE = re.compile(r"A logistic regression turns it(.*) into a risk between 0 and 1\.")
FIRST_TOKEN = "the first answer token's log maximum probability and entropy"


@pytest.mark.parametrize(
    "folder",
    sorted(SHIPPED.glob("*/[0-9]*")),
    ids=lambda folder: f"{folder.parent.name}:{folder.name}",
)
def test_the_card_that_is_shown_names_the_signals_that_are_read(folder: Path) -> None:
    bundle = load_bundle(folder)
    shown = present(SENTENCE.search(card_of(bundle)))
    assert (FIRST_TOKEN in shown[1]) is bundle.manifest.needs_first_token
    assert ("context probes" in shown[1]) is any(
        name in CONTEXT_SIGNALS for name in bundle.manifest.signals
    )
    printed = hallutracer("bundle", "show", bundle.manifest.reference).stdout
    assert shown[0] in printed
