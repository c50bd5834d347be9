"""hallutracer demo build: facts -> models -> best seed on the dev split -> both bundles -> drawing -> table.  Every
finished step leaves its result under ``out``, so an interrupted build resumes.  The test split is only reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from hallutracer_research.demo.report import LabelledAnswers, ask, report
from probes_store.bundle import Bundle
from probes_store.store import Store
from service.data.options import JudgeOptions
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines.base import Engine, EngineOptions, Sampling
from service.fitting.estimator import DepthMeanProbe
from service.fitting.scores import auroc, within_stratum_auroc
from service.library.results import draw_trajectories
from service.policies.guard import GATE
from service.scoring import Scorer
from service.trainer.options import Console, TrainOptions
from service.trainer.run import train

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
# Answers read "It is France." or "The answer is France.": only the part after the opening is judged.
JUDGE = JudgeOptions("exact", answer_pattern=r"^\s*(?:It is|The answer is)?\s*(.*?)\.?\s*$")
CHOICE_C = 0.1  # fixed for the comparison of seeds; the bundles choose their own


def build(out: Path, *, seeds: Sequence[int], threads: int, with_report: bool, console: Console) -> list[Bundle]:
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

    return Scheduled(TransformersEngine.load(EngineOptions(str(model), max_batch_tokens=BATCH_TOKENS)))


def _choose(out: Path, seeds: Sequence[int], threads: int, console: Console) -> int:
    """Return the seed whose depth mean, fitted on ``train``, ranks ``dev`` best: overall and within kind, averaged."""
    if len(seeds) == 1:
        return seeds[0]
    scores = {}
    for seed in seeds:
        with closing(_load(out / f"seed{seed}")) as engine:
            asked = ask(engine, out / f"asked-{seed}", JUDGE)
        scores[seed] = _dev_score(asked, threads)
        console.print(f"seed {seed}: dev score {scores[seed]:.4f}")
    best = max(scores, key=lambda seed: scores[seed])
    (out / "choice.json").write_text(json.dumps({"dev_score": scores, "chosen": best}, indent=2) + "\n")
    return best


def _dev_score(asked: LabelledAnswers, jobs: int) -> float:
    split = np.array([row["split"] for row in asked.rows])
    train_rows, dev = np.flatnonzero(split == "train"), np.flatnonzero(split == "dev")
    fit = DepthMeanProbe(CHOICE_C, n_jobs=jobs).refit(asked.heads, train_rows, dev, CHOICE_C)
    mean, label = fit.trajectory.mean(axis=1), asked.label[dev]
    within = within_stratum_auroc(label, -mean, [asked.rows[row]["kind"] for row in dev.tolist()])
    return (auroc(label, mean) + (within or 0.5)) / 2


def _train_bundles(out: Path, model: Path, chosen: int, jobs: int, console: Console) -> list[Bundle]:
    paths = {}
    for split in ("train", "test"):
        paths[split] = out / f"questions-{split}.jsonl"
        rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in questions(split))
        paths[split].write_text(rows, encoding="utf-8")
    store = Store(out / "probes")
    bundles = []
    for name, signals in BUNDLES.items():
        options = TrainOptions(
            data=(str(paths["train"]),), test=paths["test"], name=name, signals=signals, labels="generate",
            run_dir=out / f"run-{chosen}",  # shared: same answers and activations
            judge="exact", answer_pattern=JUDGE.answer_pattern, max_new_tokens=24, jobs=jobs,
            forms="none",  # the model was taught lone questions: in a conversation it knows nothing
        )  # fmt: skip
        bundles.append(train(options, partial(_load, model), store, console=console))
    return bundles
