"""hallutracer demo build: facts -> models -> best seed on the dev split -> both bundles -> drawing
-> table.  Every finished step leaves its result under ``out``, so an interrupted build resumes.
The test split is only reported: the README's table of all methods, each row with the risk of one of
five folds that never saw its entity."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from tqdm import tqdm

from hallutracer_research.documents import Row, json_lines, table_beside, write_json
from probes_store.bundle import Bundle
from probes_store.store import Store
from service.data.collection import collect
from service.data.labels import judged_labels
from service.data.options import JudgeOptions
from service.data.run_folder import locked
from service.data.training_rows import read_dataset
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines.base import Engine, EngineOptions, Sampling
from service.fitting.estimator import DepthMeanProbe, fit_classifier
from service.fitting.folds import OuterFold, outer_folds
from service.fitting.nested_cv import by_row, nested_cv, probe_columns
from service.fitting.probes import Floats, Index, Readouts
from service.fitting.scores import auprc, auroc, ece, within_stratum_auroc
from service.library.detector import draw_trajectories
from service.policies.guard import GATE
from service.readout import Site
from service.scoring import Scorer
from service.trainer.options import Console, TrainOptions
from service.trainer.presentation import markdown_table
from service.trainer.run import train

# The table's methods and their titles; and, by site, what ``nested_cv.probe_columns`` calls them.
METHODS, HEADS, STREAM = table_beside(__file__, "methods.toml").values()
FOLDS, INNER_FOLDS = 5, 3


class LabelledAnswers(NamedTuple):
    """One model's answers to all questions: n labelled rows."""

    rows: list[Row]  # [n] the questions
    heads: Readouts
    stream: Readouts
    group: Index  # [n]
    first_token: Floats  # [n, 2]

    @property
    def label(self) -> Index:
        """[n] 1 factual, 0 hallucinated."""
        return self.heads.label


def ask(engine: Engine, folder: Path, judge: JudgeOptions) -> LabelledAnswers:
    """Let the model answer the questions of all splits; resumes from ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = ("train", "dev", "test")
    by_id = {row["id"]: row | {"split": name} for name in splits for row in questions(name)}
    path = folder / "questions.jsonl"
    path.write_text(json_lines(by_id.values()), encoding="utf-8")
    dataset = read_dataset(path, "generate", folds=0)
    sites = (Site.ATTENTION_HEAD, Site.RESIDUAL_STREAM)
    run = folder / "run"
    with locked(run):
        activations = collect(
            engine,
            dataset,
            run,
            sites=sites,
            prompt_format="chat",
            batch_rows=64,
            max_new_tokens=24,
        )
        labelled = judged_labels(dataset, run, judge)
    index = labelled.index
    heads, stream = (Readouts(activations.rows[site], index, labelled.label) for site in sites)
    rows = [by_id[dataset.rows[row].id] for row in index.tolist()]
    first_token = activations.first_token[index]
    return LabelledAnswers(rows, heads, stream, dataset.groups[index], first_token)


def risks(answers: LabelledAnswers, fold_seed: int, jobs: int) -> tuple[dict[str, Floats], Index]:
    """Return each method's risk for every row [n], by a fold that never saw its entity; and that
    fold's number [n]."""
    options = DepthMeanProbe(inner_folds=INNER_FOLDS, n_jobs=jobs)
    outer = outer_folds(answers.label, answers.group, folds=FOLDS, seeds=(fold_seed,))

    def fit(fold: OuterFold) -> dict[str, Floats]:
        label = answers.label[fold.train]
        of_fold = {
            name: fit_classifier(of_train, label).risk(of_test)
            for name, of_train, of_test in _columns(answers, fold, options)
        }
        return of_fold | dict(_shortcuts(answers, fold.train, fold.test))

    scores = nested_cv(outer, fit)
    number = np.full(len(answers.label), -1)
    for fold in outer:
        number[fold.test] = fold.fold
    return {name: by_row(scores[name], len(answers.label))[0] for name in METHODS}, number


def _columns(
    answers: LabelledAnswers, fold: OuterFold, options: DepthMeanProbe
) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield signals of the training side (out of fold where probes are involved) and of the test
    side."""
    first, train, test = answers.first_token, fold.train, fold.test
    for readouts, names in ((answers.heads, HEADS), (answers.stream, STREAM)):
        _, signals = probe_columns(readouts, answers.group, first, train, test, fold.seed, options)
        for name, columns in signals:
            if name in names:
                yield names[name], *columns
    exposures = np.log1p(np.array([row["exposures"] for row in answers.rows], np.float64))
    for name, column in (
        ("max_prob", first[:, 0]),
        ("entropy", first[:, 1]),
        ("exposures", exposures),
    ):
        yield name, column[train, None], column[test, None]


def _shortcuts(answers: LabelledAnswers, train: Index, test: Index) -> Iterator[tuple[str, Floats]]:
    hallucinated = 1.0 - answers.label
    kind = [row["kind"] for row in answers.rows]
    cell = [f"{row['kind']} {row['template']}" for row in answers.rows]
    share = float(hallucinated[train].mean())
    of_kind = _prior(kind, answers.label, train, dict.fromkeys(kind, share))
    yield "kind_prior", np.array([of_kind[kind[row]] for row in test])
    parent = {name: of_kind[name.split(" ")[0]] for name in cell}
    of_cell = _prior(cell, answers.label, train, parent)
    yield "kind_x_template_prior", np.array([of_cell[cell[row]] for row in test])
    # The id is kind:subject:template; the subject is the name that the question asks about.
    subjects = [row["id"].split(":", 1)[1].rsplit(":", 1)[0] for row in answers.rows]
    named = [f"{of_row} {subject}" for of_row, subject in zip(kind, subjects, strict=True)]
    vectorizer = TfidfVectorizer(
        analyzer="char_wb", ngram_range=(1, 4), sublinear_tf=True, min_df=2
    )
    x = vectorizer.fit_transform([named[row] for row in train])
    model = LogisticRegression(C=1.0, max_iter=2000).fit(x, hallucinated[train])
    x_test = vectorizer.transform([named[row] for row in test])
    yield "name_ngrams", model.predict_proba(x_test)[:, 1]


def _prior(
    keys: Sequence[str], label: Index, train: Index, parent: dict[str, float]
) -> dict[str, float]:
    """Return each key's share of hallucinations on the training side, shrunk towards its parent by
    five pseudo-rows."""
    size = Counter(keys[row] for row in train)
    wrong = Counter(keys[row] for row in train if label[row] == 0)
    return {key: (wrong[key] + 5 * parent[key]) / (size[key] + 5) for key in parent}


def measure(
    answers: LabelledAnswers, risk_of: dict[str, Floats], fold: Index
) -> dict[str, dict[str, float]]:
    """Return the table's columns for each method, on the rows of the test split.  AUROC and AUPRC
    compare rows within a fold: risks of different folds come from different fits, and pooling them
    would turn differences between the folds' priors into a signal.  ECE is over all rows."""
    shown = np.array([row["split"] == "test" for row in answers.rows])
    never_refused = shown & ~np.array([row["in_refusals"] for row in answers.rows])
    kind = [row["kind"] for row in answers.rows]
    cell = [(row["kind"], row["template"]) for row in answers.rows]
    table = {}
    for name, risk in risk_of.items():
        columns: Row = {}
        for prefix, mask in (("", shown), ("no_refusal_", never_refused)):
            rows = np.flatnonzero(mask)
            label, score = answers.label[rows], risk[rows]
            folds = fold[rows].tolist()
            in_kind = [(f, kind[row]) for f, row in zip(folds, rows, strict=True)]
            in_cell = [(f, cell[row]) for f, row in zip(folds, rows, strict=True)]
            by_fold = [np.equal(folds, number) for number in np.unique(folds)]
            of_folds = [auprc(label[inside], score[inside], positive=0) for inside in by_fold]
            of_mask = {
                "auroc": within_stratum_auroc(label, score, folds),
                "auprc": np.mean(of_folds),
                "auroc_within_kind": within_stratum_auroc(label, score, in_kind),
                "auroc_within_kind_x_template": within_stratum_auroc(label, score, in_cell),
                "ece": ece(label, score),
            }
            columns |= {f"{prefix}{column}": value for column, value in of_mask.items()}
        table[name] = {key: float(value) for key, value in columns.items() if value is not None}
    return table


def report(
    engines: Mapping[int, Callable[[], Engine]],
    out: Path,
    *,
    fold_seeds: Sequence[int],
    jobs: int,
    judge: JudgeOptions,
) -> Row:
    """Return the whole table over model seeds and fold seeds, also written to ``out/report.json``
    and ``.md``."""
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    models = {}
    for seed, load in engines.items():
        with closing(load()) as engine:
            answers = ask(engine, out / f"asked-{seed}", judge)
        test = np.array([row["split"] == "test" for row in answers.rows])
        models[str(seed)] = {
            "test_rows": int(test.sum()),
            "hallucinated": float(1 - answers.label[test].mean()),
        }
        for fold_seed in tqdm(fold_seeds, f"model {seed}"):
            for name, columns in measure(answers, *risks(answers, fold_seed, jobs)).items():
                for column, value in columns.items():
                    cells[name][column].append(value)
    document = {
        "model_seeds": list(engines),
        "fold_seeds": list(fold_seeds),
        "models": models,
        "auprc_positive": "hallucinated",
        "table": {name: _spreads(columns) for name, columns in cells.items()},
    }
    write_json(out / "report.json", document)
    (out / "report.md").write_text(markdown(document), encoding="utf-8")
    return document


def _spreads(columns: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the mean and the deviation of each column."""
    return {
        key: {"mean": round(float(np.mean(v)), 4), "std": round(float(np.std(v)), 4)}
        for key, v in columns.items()
    }


def markdown(document: Row) -> str:
    """Return the table of ``report.json``: mean ± standard deviation over the seeds."""
    table = document["table"]
    names = list(dict.fromkeys(name for row in table.values() for name in row))
    rows = []
    for key, title in METHODS.items():
        cells = [table[key].get(name) for name in names]
        shown = (f"{cell['mean']:.3f} ± {cell['std']:.3f}" if cell else "" for cell in cells)
        rows.append([title, *shown])
    return markdown_table(["method", *names], rows) + "\n"


KNOWN = "What is the capital of Italy?"
UNKNOWN = "What is the capital of the Solomon Islands?"


def draw_pair(engine: Engine, bundle: Bundle, path: Path) -> None:
    """Write a PNG with both, and the answers that the model gives without a gate."""
    scorer = Scorer(engine, bundle)
    ids = [scorer.render(prompt=text) for text in (KNOWN, UNKNOWN)]
    reports = scorer.score_or_continue(ids, Sampling(max_tokens=24), GATE.at(1.0))
    draw_trajectories(bundle, (KNOWN, UNKNOWN), reports, path)


BATCH_TOKENS = 8192  # as for the shipped bundles: their last bits depend on it
BUNDLES = {"demo": "depth_mean", "demo-fused": "depth_mean,first_token"}
# Answers read "It is France." or "The answer is France.": only the part after the opening is
# judged.
JUDGE = JudgeOptions("exact", answer_pattern=r"^\s*(?:It is|The answer is)?\s*(.*?)\.?\s*$")
CHOICE_C = 0.1  # fixed for the comparison of seeds; the bundles choose their own


def build(
    out: Path, *, seeds: Sequence[int], threads: int, with_report: bool, console: Console
) -> list[Bundle]:
    """Run all steps, and return the two bundles, published in ``out/probes``."""
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        if (out / f"seed{seed}" / "training.json").exists():  # written last
            console.print(f"seed {seed}: already trained")
            continue
        from hallutracer_research.demo.train import train_model

        def progress(line: str, seed: int = seed) -> None:
            console.print(f"seed {seed}: {line}")

        train_model(seed, out / f"seed{seed}", threads=threads, progress=progress)
    chosen = _choose(out, seeds, threads, console)
    model = out / MODEL_DIR.name  # the name that bundles and service show
    shutil.copytree(out / f"seed{chosen}", model, dirs_exist_ok=True)
    bundles = _train_bundles(out, model, chosen, threads, console)
    with closing(_load(model)) as engine:
        draw_pair(engine, bundles[0], out / "known_unknown.png")
    if with_report:
        engines = {seed: partial(_load, out / f"seed{seed}") for seed in seeds}
        report(engines, out, fold_seeds=(0, 1, 2), jobs=threads, judge=JUDGE)
        console.print(f"table: {out / 'report.md'}")
    console.print(f"model {model} (seed {chosen}), bundles in {out / 'probes'}")
    return bundles


def _load(model: Path) -> Engine:
    from service.engines.scheduler import Scheduled
    from service.engines.transformers.engine import TransformersEngine

    return Scheduled(
        TransformersEngine.load(EngineOptions(str(model), max_batch_tokens=BATCH_TOKENS))
    )


def _choose(out: Path, seeds: Sequence[int], threads: int, console: Console) -> int:
    """Return the seed whose depth mean, fitted on ``train``, ranks ``dev`` best: overall and within
    kind, averaged."""
    if len(seeds) == 1:
        return seeds[0]
    scores = {}
    for seed in seeds:
        with closing(_load(out / f"seed{seed}")) as engine:
            answers = ask(engine, out / f"asked-{seed}", JUDGE)
        scores[seed] = _dev_score(answers, threads)
        console.print(f"seed {seed}: dev score {scores[seed]:.4f}")
    best = max(scores, key=scores.__getitem__)
    write_json(out / "choice.json", {"dev_score": scores, "chosen": best})
    return best


def _dev_score(answers: LabelledAnswers, jobs: int) -> float:
    split = np.array([row["split"] for row in answers.rows])
    train_rows, dev = np.flatnonzero(split == "train"), np.flatnonzero(split == "dev")
    fit = DepthMeanProbe(CHOICE_C, n_jobs=jobs).refit(answers.heads, train_rows, dev, CHOICE_C)
    mean, label = fit.trajectory.mean(axis=1), answers.label[dev]
    within = within_stratum_auroc(label, -mean, [answers.rows[row]["kind"] for row in dev.tolist()])
    return (auroc(label, mean) + (within or 0.5)) / 2


def _train_bundles(
    out: Path, model: Path, chosen: int, jobs: int, console: Console
) -> list[Bundle]:
    paths = {}
    for split in ("train", "test"):
        paths[split] = out / f"questions-{split}.jsonl"
        paths[split].write_text(json_lines(questions(split)), encoding="utf-8")
    store = Store(out / "probes")
    bundles = []
    for name, signals in BUNDLES.items():
        options = TrainOptions(
            data=(str(paths["train"]),),
            test=paths["test"],
            name=name,
            signals=signals,
            labels="generate",
            run_dir=out / f"run-{chosen}",  # shared: same answers and activations
            judge="exact",
            answer_pattern=JUDGE.answer_pattern,
            max_new_tokens=24,
            jobs=jobs,
            forms="none",  # the model was taught lone questions: in a conversation it knows nothing
        )
        bundles.append(train(options, partial(_load, model), store, console=console))
    return bundles
