"""Peak memory of the trainer's fits on rows of a 7B model's shape, all its processes together.

    python -m benchmarks.trainer_memory [--rows 20000] [--layers 28] [--heads 28] [--folder DIR] [--json OUT]

A rows file [layers, rows, heads x 128] (8 GB for the defaults) is written with correlated
readouts, the same in every layer; then, in a process of its own, the trainer's own steps: the choice of C, the
cross-fit of 5 folds x 3 seeds, the refit.  Memory is the processes' private memory (PSS of anonymous pages,
sampled five times a second), without the mapped file.  The exit status is 1 above 2 GiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Check, conclude, say
from benchmarks.solver import DIM, labels, layer
from benchmarks.vllm_turns import group_memory_gib
from service.data.run_folder import RowsFile
from service.fitting.estimator import DepthMeanProbe
from service.fitting.probes import Readouts
from service.readout import Geometry, Site

LIMIT_GIB = 2.0


def rows_file(options: argparse.Namespace) -> RowsFile:
    geometry = Geometry(options.layers, options.heads, DIM, options.heads * DIM)
    return RowsFile(options.folder / "rows.f32", geometry, Site.ATTENTION_HEAD, options.rows)


def fit(options: argparse.Namespace) -> None:
    """What a training run does after it has collected."""
    file, label = rows_file(options), labels(options.rows)
    readouts = Readouts(file, np.arange(options.rows), label)
    group, every = np.arange(options.rows) // 2, np.arange(options.rows)
    settings = DepthMeanProbe(n_jobs=options.jobs)
    begun = time.perf_counter()
    choice = settings.choose_c(readouts, group, every, 0)
    say(f"C = {choice.c:g} after {time.perf_counter() - begun:.0f} s")
    settings.cross_fit(readouts, group, every, choice.c, 5, (0, 1, 2))
    say(f"cross-fitted after {time.perf_counter() - begun:.0f} s")
    settings.refit(readouts, every, every, choice.c)
    say(f"refitted after {time.perf_counter() - begun:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only-fit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_fit:
        fit(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="hallutracer-bench-", dir=options.folder) as folder:
        options.folder = Path(folder)
        made = np.ascontiguousarray(layer(0, options.heads, options.rows).transpose(1, 0, 2), "<f4").tobytes()
        with rows_file(options).path.open("wb") as file:
            for _ in range(options.layers):
                file.write(made)
        say(f"{rows_file(options).nbytes / 2**30:.1f} GiB of rows; one layer {len(made) / 2**20:.0f} MiB")
        del made
        arguments = [f"--{name}={getattr(options, name)}" for name in ("rows", "layers", "heads", "jobs", "folder")]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trainer_memory", "--only-fit", *arguments], start_new_session=True
        )
        peak, begun = 0.0, time.monotonic()
        while process.poll() is None:
            peak = max(peak, group_memory_gib(process.pid))
            time.sleep(0.2)
        seconds = time.monotonic() - begun
        if process.returncode:
            raise SystemExit(process.returncode)
    check = Check("peak memory of the fits, all processes", f"{peak:.2f} GiB", f"< {LIMIT_GIB:g} GiB", peak < LIMIT_GIB,
                  f"{options.rows} rows, {options.layers} x {options.heads} x {DIM}, {options.jobs} processes, "
                  f"{seconds:.0f} s")  # fmt: skip
    return conclude([check], options.json, {"peak_gib": peak, "seconds": seconds, "rows": options.rows})


if __name__ == "__main__":
    sys.exit(main())
