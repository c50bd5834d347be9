"""The L1 solver beside the obvious way, a loop over scikit-learn's liblinear with joblib on all cores, in one run.

    python -m tests.bench.solver [--heads 28] [--layers 28] [--rows 5000] [--reference-heads 4] [--json OUT] [--quick]

Readouts of one layer are mixed from a shared state, so heads are correlated as a model's are; each column has an offset
and a scale.  5 folds, 6 values of C, class weights.  The loop is timed on a stated number of heads, all folds and all C
of each (``--reference-heads``; 4 x 30 = 120 fits a round), in rounds that alternate with ours on the same heads, and
scaled to the whole grid by the number of heads; ours is also timed on the whole grid.

  objective   of every reference problem: ours over liblinear's (tolerance 1e-4)
  heads       the head that each layer would select, by training AUROC, from either solver's probes
  growth      seconds against rows and against heads, slopes on logarithmic axes, and a picture

The exit status is 1 where a target is missed: 20 times the loop, objectives within 1e-4, the same heads or an AUROC
within 0.001.  About 8 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed, parallel_config
from sklearn.linear_model import LogisticRegression

from service.measures import auroc
from service.trainer.fit import row_weights
from service.trainer.solver import INTERCEPT_PENALTY, one_torch_thread, solve
from tests.bench.load_stats import Check, table

DIM = 128
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FOLDS = 5


def layer(number: int, heads: int, rows: int) -> np.ndarray:
    """Readouts [heads, rows, DIM] float32 of one layer."""
    rng = np.random.default_rng(1_000 + number)
    label = labels(rows)
    shared = 4 * DIM
    spectrum = np.arange(1, shared + 1) ** -0.5
    state = rng.standard_normal((rows, shared), np.float32) * spectrum.astype(np.float32)
    quiet = rng.standard_normal(shared) * spectrum * 0.12
    state += label[:, None] * quiet.astype(np.float32)
    found = np.empty((heads, rows, DIM), np.float32)
    for head in range(heads):
        mix = (rng.standard_normal((shared, DIM)) / np.sqrt(shared)).astype(np.float32)
        offset, scale = rng.standard_normal(DIM) * 0.3, rng.uniform(0.3, 3.0, DIM)
        found[head] = (state @ mix + 0.15 * rng.standard_normal((rows, DIM), np.float32) + offset) * scale
    return found


def labels(rows: int) -> np.ndarray:
    """[rows], 45 % factual."""
    return (np.random.default_rng(7).random(rows) < 0.45).astype(np.int64)


def folds(rows: int) -> np.ndarray:
    """Weights [FOLDS, rows]: 0 on the test side, class weights on the other."""
    label, fold = labels(rows), np.random.default_rng(8).permutation(rows) % FOLDS
    weight = np.zeros((FOLDS, rows))
    for place in range(FOLDS):
        train = np.flatnonzero(fold != place)
        weight[place, train] = row_weights(label[train], "weights")
    return weight


PARTITION, C = np.repeat(np.arange(FOLDS), len(GRID)), np.tile(GRID, FOLDS)


def ours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [h, P, DIM] and intercepts [h, P], raw space; one process."""
    with one_torch_thread():
        found = solve(x, labels(x.shape[1]), folds(x.shape[1]), PARTITION, C)
    return found.weight, found.intercept


def ours_of_layer(number: int, heads: int, rows: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Some heads of a made layer; the seconds are the solver's alone."""
    x = layer(number, heads, rows)[first:last]
    begun = time.perf_counter()
    return (*ours(x), time.perf_counter() - begun)


def loop_one(x: np.ndarray, label: np.ndarray, weight: np.ndarray, c: float) -> tuple[np.ndarray, float]:
    """One fit as a user of scikit-learn writes it: standardise, liblinear.  Raw-space weight and intercept."""
    train = weight > 0
    z = x[train].astype(np.float64)
    mean, std = z.mean(0), z.std(0)
    z = (z - mean) / std
    model = LogisticRegression(
        C=c, l1_ratio=1.0, solver="liblinear", class_weight="balanced", intercept_scaling=1 / INTERCEPT_PENALTY,
        random_state=0, max_iter=5000,
    ).fit(z, label[train])  # fmt: skip
    raw = model.coef_[0] / std
    return raw, float(model.intercept_[0] - raw @ mean)


def loop(x: np.ndarray, jobs: int) -> tuple[np.ndarray, np.ndarray]:
    """All problems of some heads, joblib over the fits."""
    label, weight = labels(x.shape[1]), folds(x.shape[1])
    work = [(head, place) for head in range(len(x)) for place in range(len(C))]
    with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1):
        found = Parallel()(delayed(loop_one)(x[h], label, weight[PARTITION[p]], C[p]) for h, p in work)
    shape = (len(x), len(C))
    return np.stack([raw for raw, _ in found]).reshape(*shape, -1), np.array([b for _, b in found]).reshape(shape)


def objectives(x: np.ndarray, weight: np.ndarray, intercept: np.ndarray) -> np.ndarray:
    """[h, P], each on its own standardised training rows."""
    label, s = labels(x.shape[1]), folds(x.shape[1])
    found = np.empty(weight.shape[:2])
    for head in range(len(x)):
        for p, (place, c) in enumerate(zip(PARTITION, C, strict=True)):
            train = s[place] > 0
            rows = x[head, train].astype(np.float64)
            mean, std = rows.mean(0), rows.std(0)
            raw = weight[head, p]
            margin = (2 * label[train] - 1) * (rows @ raw + intercept[head, p])
            own = intercept[head, p] + raw @ mean
            found[head, p] = c * np.sum(s[place, train] * np.logaddexp(0, -margin)) + np.abs(raw * std).sum()
            found[head, p] += INTERCEPT_PENALTY * abs(own)
    return found


def training_aurocs(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[h, P]; 0 where a probe is zero."""
    label, s = labels(x.shape[1]), folds(x.shape[1])
    found = np.zeros(weight.shape[:2])
    for head in range(len(x)):
        for p, place in enumerate(PARTITION):
            if np.any(weight[head, p]):
                train = s[place] > 0
                found[head, p] = auroc(label[train], x[head, train].astype(np.float64) @ weight[head, p])
    return found


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Of the line through logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def say(words: str) -> None:
    """A line with the time."""
    print(time.strftime("%H:%M:%S"), words, flush=True)


def picture(growth: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Seconds against rows and heads, log-log, with slopes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, (name, found) in zip(axes, growth.items(), strict=True):
        axis.loglog(found["size"], found["seconds"], "o-", color="#1f6feb")
        power = slope([int(size) for size in found["size"]], found["seconds"])
        axis.set(xlabel=name, ylabel="seconds, one core", title=f"slope {power:.2f}")
        axis.set_xticks(found["size"], [f"{size:g}" for size in found["size"]])
        axis.minorticks_off()
        axis.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> int:
    """The run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--reference-heads", type=int, default=4, help="heads that the loop is timed on, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing judged")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.heads, options.rows, options.rounds, options.reference_heads = 2, 4, 600, 2, 2
    jobs = os.cpu_count() or 1
    record: dict[str, Any] = {"cpus": jobs, "options": {k: str(v) for k, v in vars(options).items()}}
    with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1):
        Parallel()(delayed(ours_of_layer)(0, 1, 300, 0, 1) for _ in range(2 * jobs))  # processes and compiled code

    # The two side by side, on the same heads.
    count, ratios, worst, loop_seconds, problems = options.reference_heads, [], -np.inf, [], 0
    same, differences = 0, []
    for number in range(options.rounds):
        x = layer(number, count, options.rows)
        halves = np.array_split(np.arange(count), jobs)
        took: dict[str, float] = {}
        for side in ("loop", "ours") if number % 2 == 0 else ("ours", "loop"):
            begun = time.perf_counter()
            if side == "loop":
                theirs = loop(x, jobs)
            else:
                with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1):
                    parts = Parallel()(delayed(ours)(x[half]) for half in halves if len(half))
                mine = tuple(np.concatenate([part[place] for part in parts]) for place in (0, 1))
            took[side] = time.perf_counter() - begun
        ratios.append(took["loop"] / took["ours"])
        loop_seconds.append(took["loop"] / count)
        relative = objectives(x, *mine) / objectives(x, *theirs) - 1
        worst, problems = max(worst, float(relative.max())), problems + relative.size
        a, b = training_aurocs(x, mine[0]), training_aurocs(x, theirs[0])
        same += int(np.sum(a.argmax(0) == b.argmax(0)))
        differences.append(float(np.abs(a.max(0) - b.max(0)).max()))
        say(f"round {number + 1}: loop {took['loop']:.1f} s, ours {took['ours']:.2f} s, {ratios[-1]:.1f} times; "
            f"objective at most {relative.max():+.1e}, at least {relative.min():+.1e}")  # fmt: skip
    # The whole grid.
    halves = np.array_split(np.arange(options.heads), jobs)
    begun = time.perf_counter()
    with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1):
        found = Parallel()(
            delayed(ours_of_layer)(number, options.heads, options.rows, int(half[0]), int(half[-1]) + 1)
            for number in range(options.layers)
            for half in halves
        )
    wall = time.perf_counter() - begun
    cores = sum(seconds for _, _, seconds in found)
    whole = cores / jobs
    scaled = statistics.median(loop_seconds) * options.heads * options.layers
    say(f"whole grid: {cores:.1f} core-seconds of solving ({wall:.0f} s with making the data); "
        f"the loop, scaled from {count} heads: {scaled:.0f} s")  # fmt: skip
    # Growth, one core.
    growth: dict[str, dict[str, list[float]]] = {}
    sizes = [options.rows // 4, options.rows // 2, options.rows, 2 * options.rows, 4 * options.rows]
    seconds = [min(ours_of_layer(0, 2, size, 0, 2)[2] for _ in range(2)) for size in sizes]
    growth["rows"] = {"size": list(map(float, sizes)), "seconds": seconds}
    heads = [1, 2, 4, 8, 16]
    seconds = [min(ours_of_layer(0, 16, options.rows, 0, size)[2] for _ in range(2)) for size in heads]
    growth["heads"] = {"size": list(map(float, heads)), "seconds": seconds}
    if options.plot:
        picture(growth, options.plot)
    slopes = {name: slope([int(s) for s in one["size"]], one["seconds"]) for name, one in growth.items()}

    judged = not options.quick
    least = min(scaled / whole, statistics.median(ratios))
    checks = [
        Check("speed over the loop, same heads, paired", f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to "
              f"{max(ratios):.1f})", ">= 20", statistics.median(ratios) >= 20 if judged else None,
              f"{count} heads x {len(C)} fits a round, {options.rounds} rounds"),
        Check("speed over the loop, whole grid", f"{scaled / whole:.1f}", ">= 20", least >= 20 if judged else None,
              f"{whole:.1f} s on {jobs} cores; loop {scaled:.0f} s, scaled from {count} heads"),
        Check("objective over liblinear's, worst", f"{worst:+.1e}", "<= 1e-4", worst <= 1e-4, f"{problems} problems"),
        Check("selected head", f"{same} of {options.rounds * len(C)} the same; AUROC within {max(differences):.1e}",
              "same or <= 0.001", max(differences) <= 1e-3),
        Check("growth with rows, slope", f"{slopes['rows']:.2f}", "(reported)", None, str(growth["rows"])),
        Check("growth with heads, slope", f"{slopes['heads']:.2f}", "(reported)", None, str(growth["heads"])),
    ]  # fmt: skip
    print(table(checks), flush=True)
    record |= {"ratios": ratios, "whole_s": whole, "loop_scaled_s": scaled, "growth": growth, "slopes": slopes,
               "worst": worst, "problems": problems}  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    return int(any(check.passed is False for check in checks))


if __name__ == "__main__":
    sys.exit(main())
