"""The Python API on the demo model: results, errors, docstrings, and the same bundle as from the
command line."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import hallutracer as ht
from hallutracer_research.evaluating import BadSource
from probes_store.store import Store
from service.demo.questions import questions
from service.engines.base import EngineName, EngineOptions
from service.errors import DataError, EngineError, ModelLoadError, RequestError
from service.library import engine as library_engine
from service.library import training
from tests.command_line import hallutracer
from tests.fitting.planted import PlantedEngine, planted_rows

pytestmark = pytest.mark.usefixtures("no_pictures")

ITALY, SOLOMON = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
QUIET: dict[str, Any] = {"report": lambda line: None}
QUICK: dict[str, Any] = QUIET | {"evaluate": False, "folds": 3, "seeds": (0,), "c": 0.1, "jobs": 1}


def labelled(every: int) -> list[dict[str, Any]]:
    """What the demo model has read often it mostly knows."""
    return [
        {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
        for row in questions("train")[::every]
    ]


@pytest.fixture(scope="module")
def detector() -> Iterator[ht.Detector]:
    with ht.load("demo", **QUIET) as loaded:
        yield loaded


def test_results_are_those_of_the_command_line(detector: ht.Detector) -> None:
    done = hallutracer("score", ITALY, SOLOMON, "--json", "--generate", "8", "--trajectory")
    for risk, told in zip(
        detector.score([ITALY, SOLOMON], generate=8), json.loads(done.stdout)["data"], strict=True
    ):
        assert risk.risk == pytest.approx(told["risk"], abs=1e-6)
        assert risk.trajectory == pytest.approx(told["trajectory"], abs=1e-4)
        assert (risk.decision, risk.flagged) == (told["decision"], told["flagged"])
        assert risk.answer == (told["completion"]["text"].strip() if "completion" in told else None)
        assert risk.running_mean[-1] == pytest.approx(risk.depth_mean)


def test_results_are_frozen_and_a_slice_is_a_result(detector: ht.Detector) -> None:
    risks = detector.score([ITALY, SOLOMON, ITALY])
    with pytest.raises(dataclasses.FrozenInstanceError):
        risks[0].risk = 0.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        risks[0].trajectory[0] = 0.0
    part = risks[1:]
    assert isinstance(part, ht.Risks)
    assert [risk.text for risk in part] == [SOLOMON, ITALY]
    assert part.trajectory.shape == (2, 8)
    assert np.array_equal(part.risk, [risks[1].risk, risks[2].risk])
    assert detector.score([]).trajectory.shape == (0, 8)


@pytest.mark.parametrize("site", ["attention_head", "residual_stream"])
def test_a_probe_of_extracted_arrays_is_the_one_that_train_fits(tmp_path: Path, site: Any) -> None:
    """On 120 rows: the same heads, directions, scale, classifier and threshold, to the last bit,
    and so one digest."""
    rows = labelled(25)
    fit: dict[str, Any] = {"folds": 3, "seeds": (0,), "logit_scale": "standardized"}
    publish = QUIET | {
        "store": tmp_path,
        "run_dir": tmp_path / "run",
        "jobs": 1,
        "evaluate": False,
        "allow_no_signal": True,
    }
    trained = ht.train(rows, "probe", "demo", readout=site, c=0.1, **fit, **publish)
    x = ht.extract([row["prompt"] for row in rows], "demo", site=site, **QUIET)
    y, groups = [row["label"] for row in rows], [row["group"] for row in rows]
    probe = ht.DepthMeanProbe(0.1, **fit).fit(x, y, groups=groups)
    published = ht.publish(probe, rows, "probe", "demo", **publish)
    assert published.bundle.manifest.digest == trained.bundle.manifest.digest
    for changed in (x[::-1].copy(), x[:100]):
        count = len(changed)
        other = ht.DepthMeanProbe(0.1, **fit).fit(changed, y[:count], groups=groups[:count])
        with pytest.raises(ht.HalluTracerError, match="other activations") as caught:
            ht.publish(other, rows, "probe", "demo", **publish)
        assert getattr(caught.value, "param", None) == "probe"


def test_messages_texts_and_thresholds(detector: ht.Detector) -> None:
    turn = [{"role": "user", "content": ITALY}]
    one, both = detector.score(turn), detector.score([turn, ITALY])
    assert (len(one), len(both)) == (1, 2)
    assert one[0].risk == pytest.approx(both[1].risk, abs=1e-5)
    assert (one[0].prompt, one[0].text) == (tuple(turn), ITALY)
    assert [risk.flagged for risk in detector.score([ITALY, SOLOMON])] == [False, True]
    strict = detector.score([ITALY, SOLOMON], threshold=0.0, generate=4)
    assert [(risk.flagged, risk.answer) for risk in strict] == [(True, None)] * 2


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([3], {}, r"prompts\[0\] is int"),
        ("", {}, "empty"),
        ([[]], {}, "messages"),
        ([ITALY, [{"role": "user"}]], {}, "exactly a text 'role' and a text 'content'"),
        (ITALY, {"generate": -1}, "generate"),
        (ITALY, {"threshold": 2.0}, "threshold"),
    ],
)
def test_no_prompts_and_options(
    detector: ht.Detector, prompts: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        detector.score(prompts, **options)


def test_a_frame_and_a_picture(detector: ht.Detector) -> None:
    risks = detector.score([ITALY, SOLOMON])
    frame = risks.to_frame(trajectory=True)
    assert list(frame.risk) == [risk.risk for risk in risks]
    assert np.array_equal(
        frame[[f"layer_{layer}" for layer in range(8)]].to_numpy(), risks.trajectory
    )
    assert "layer_0" not in risks.to_frame()
    axes = risks.plot()
    assert [
        line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "o"
    ] == risks.trajectory.tolist()
    assert risks.plot(axes) is axes
    with pytest.raises(ValueError, match=r"these are 7: take some, as in risks\[:6\].plot"):
        ht.Risks(risks.rows * 3 + risks.rows[:1], detector.bundle).plot()


def test_the_longest_titles_lie_inside_the_picture(detector: ht.Detector) -> None:
    (risk,) = detector.score(ITALY)
    question = "Which of the two largest cities " * 4
    answer = "It is the capital of the Republic " * 4
    long = dataclasses.replace(risk, prompt=question, answer=answer)
    figure = ht.Risks((long,) * 6, detector.bundle).plot().figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 < figure.axes[0].get_tightbbox().y0


def test_without_pandas_the_cure_is_named(
    detector: ht.Detector, monkeypatch: pytest.MonkeyPatch
) -> None:
    risks = detector.score(ITALY)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        risks.to_frame()


def test_a_closed_detector() -> None:
    with ht.load("demo", **QUIET) as detector:
        pass
    with pytest.raises(EngineError, match="closed"):
        detector.score(ITALY)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("./nope", "demo"), ModelLoadError, "./nope.*bundle demo:1 is for hallutracer"),
        (("./nope",), ModelLoadError, "./nope"),
        (("some-model",), ht.HalluTracerError, "'some-model'.*--bundle"),
        (("demo", "mine"), ht.BundleError, "no bundle mine"),
    ],
)
def test_models_and_bundles_that_are_not_there(
    arguments: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ht.load(*arguments)


@pytest.mark.parametrize("site", ["residual", "heads", "", None, ["attention_head"]])
def test_a_site_that_is_none_is_told_which_there_are(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "load_engine", lambda *_, **__: pytest.fail("it began to load"))
    with pytest.raises(
        RequestError, match="it must be attention_head or residual_stream"
    ) as caught:
        ht.extract(ITALY, "demo", site=site)
    assert (caught.value.param, repr(site) in str(caught.value)) == ("site", True)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("engine", "vLLM", "'transformers' or 'vllm', not 'vLLM'"),
        ("dtype", "fp16", "'float16', not 'fp16'"),
        ("threads", 0, "must be >= 1, not 0"),
        ("max_batch_tokens", "many", "integer, not 'many'"),
        ("device", "gpu", "unknown to torch; use cpu, cuda or cuda:0"),
    ],
)
def test_how_a_model_cannot_be_loaded_is_told_before_it_is(
    field: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "service.library.detector.load_engine", lambda *_, **__: pytest.fail("it began to load")
    )
    with pytest.raises(ModelLoadError, match=said) as caught:
        ht.load("demo", engine=ht.Engine(**{field: value}))
    assert caught.value.param == field


def test_a_finished_run_does_not_block_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "load_engine", lambda *_, **__: PlantedEngine())
    made = [
        ht.train(planted_rows(120, seed=seed), "mine", "demo", store="store", **QUICK)
        for seed in (1, 2, 1)
    ]
    assert [(one.reference, str(one.run_dir)) for one in made] == [
        ("mine:1", "runs/mine"),
        ("mine:2", "runs/mine-2"),
        ("mine:1", "runs/mine"),
    ]


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_template_arguments_of_training_are_the_engines_and_the_bundles(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(options: Any, **_: Any) -> PlantedEngine:
        engine = PlantedEngine()
        engine.identity = dataclasses.replace(
            engine.identity, template_arguments=options.template_arguments
        )
        return engine

    monkeypatch.setattr(training, "load_engine", load)
    options = QUICK | {"keep_sample": False, "store": tmp_path, "run_dir": tmp_path / "run"}
    rows = planted_rows(120, seed=1)
    made = ht.train(rows, "mine", "demo", chat_template_kwargs=given, **options)
    assert made.bundle.manifest.chat_template.arguments == {"enable_thinking": False}
    assert 'the chat template given `{"enable_thinking": false}`' in made.card
    arguments = [options.template_arguments for options in served_options(made.bundle, monkeypatch)]
    assert arguments == [{"enable_thinking": False}] * 2
    for wrong in ("{", "[]", '{"messages": "x"}', '{"a": null}', {"a": [1]}):
        with pytest.raises(ht.HalluTracerError, match="chat_template_kwargs"):
            ht.train(rows, "mine", "demo", chat_template_kwargs=wrong, **options)


def served_options(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How both engines are loaded for a bundle."""
    asked = list[Any]()
    for function in ("_transformers", "_vllm"):
        monkeypatch.setattr(library_engine, function, lambda options, *_: asked.append(options))
    for name in get_args(EngineName):
        options = EngineOptions("model", engine=name)
        library_engine.load_engine(options, bundles=[bundle], checked=True)
    return asked


@pytest.mark.long
def test_training_is_that_of_the_command_line(tmp_path: Path) -> None:
    """The same bundle to the byte; and the command ends with a table, the next commands, and one
    digest."""
    rows = labelled(15)
    options: dict[str, Any] = {"seeds": (0,), "folds": 3, "c": 0.1, "jobs": 1}
    trained = ht.train(
        rows, "mine", "demo", store=tmp_path / "a", run_dir=tmp_path / "run", **options, **QUIET
    )
    data, store = tmp_path / "run" / "rows.jsonl", tmp_path / "b"
    train = f"train --data {data} --name mine --model demo --run-dir {tmp_path / 'run-b'}"
    done = hallutracer(*f"{train} --seeds 1 --folds 3 --c 0.1 --jobs 1 --store {store}".split())
    assert done.returncode == 0, done.stderr
    bundle = Store(store).load("mine")
    assert bundle.manifest.digest == trained.bundle.manifest.digest
    assert (done.stdout + done.stderr).count(bundle.manifest.digest) == 1
    own = trained.own
    assert own is not None
    assert f"> {own.title}" in done.stderr
    assert f"{own.auroc:.3f} [{own.low:.3f}, {own.high:.3f}] | {own.ece:.3f} |" in done.stderr
    assert "| best single head " in done.stderr
    after = done.stderr.partition("published mine:1")[2]
    assert f"hallutracer bundle show mine --store {store}" in after.partition("next:")[2]
    assert (
        repr(trained) == f"<Trained: mine:1, AUROC {own.auroc:.3f} [{own.low:.3f}, {own.high:.3f}];"
        f" {trained.folder}>"
    )
    assert trained.card.startswith("---\nbase_model: hallutracer-demo\nlibrary_name: hallutracer\n")
    assert set(trained.to_frame().title) >= {"best single head", "first-token entropy"}


@pytest.mark.parametrize(
    ("forms", "wanted"),
    [("lone, greeting", ("lone", "greeting")), (["lone", "turns"], ("lone", "turns")), ([], ())],
)
def test_forms_are_written_as_on_the_command_line_or_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forms: Any, wanted: tuple[str, ...]
) -> None:
    monkeypatch.setattr(training, "run_training", lambda options, *_, **__: options)
    options: dict[str, Any] = {"labels": "generate", "run_dir": tmp_path, "forms": forms, **QUIET}
    given: Any = ht.train([{"prompt": "a", "answers": ["x"]}], "some", "demo", **options)
    given.check()
    assert given.wanted_forms == wanted


def test_what_is_wrong_with_training_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    folders: dict[str, Any] = {"store": tmp_path, "run_dir": tmp_path / "run", **QUIET}
    one = [{"prompt": "a", "label": 1}]
    with pytest.raises(DataError, match="line 1 and 1 more line: 'label' is missing"):
        ht.train([{"prompt": "a"}, {"prompt": "b"}], "mine", "./nope", **folders)
    with pytest.raises(TypeError, match="no_such_option"):
        ht.train(one, "mine", "demo", no_such_option=1, **folders)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"folds": 1}, "folds: must be >= 2"),
        ({"c": "auto"}, "c: .*number"),
        ({"readout": "residual"}, "'attention_head' or 'residual_stream', not 'residual'"),
        ({"labels": "model"}, "'given', 'generate' or 'self', not 'model'"),
        ({"class_balance": "x"}, "class_balance"),
    ]
    for options, said in wrong:
        with pytest.raises(ht.HalluTracerError, match=said) as caught:
            ht.train(one, "mine", "demo", **options, **folders)
        assert getattr(caught.value, "param", None) in options


def test_rows_of_a_frame_are_written_as_json(tmp_path: Path) -> None:

    row = {
        "prompt": "é",
        "label": np.int64(1),
        "answers": np.array(["a", "b"]),
        "group": float("nan"),
        "id": None,
    }
    written = json.loads(training.rows_file([row], tmp_path / "run").read_text(encoding="utf-8"))
    assert written == {"prompt": "é", "label": 1, "answers": ["a", "b"]}
    with pytest.raises(TypeError, match="a row holds object"):
        training.rows_file([{"prompt": object()}], tmp_path / "run")


@pytest.mark.parametrize("data", ["nowhere.jsonl", {"no-such-set": "."}])
def test_data_that_is_not_there(data: Any) -> None:
    with pytest.raises(BadSource, match="is neither a JSONL file nor"):
        ht.evaluate(data, "demo")


def test_only_what_is_public_is_there() -> None:
    assert dir(ht) == sorted(ht.__all__)
    with pytest.raises(AttributeError, match="has no 'predict'; it has"):
        ht.predict  # noqa: B018


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    found = []
    for name in ht.__all__:
        thing = getattr(ht, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found += finder.find(thing, name, module=inspect.getmodule(thing), globs={})
    return found


def test_what_is_public_has_examples() -> None:
    names = {test.name for test in examples() if test.examples}
    assert names >= {"load", "Detector.score", "train", "extract", "publish", "evaluate"}


@pytest.mark.parametrize(
    "test", [test for test in examples() if test.examples], ids=lambda test: test.name
)
def test_examples_run(test: doctest.DocTest) -> None:
    said: list[str] = []
    # Else it would be as talkative as ``pytest -v``.
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
