"""``hallutracer diagnose`` on files: what it writes, and what it says of files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import hallutracer as ht
from hallutracer_research.paper.diagnose import LIMIT, diagnose_set, read_set
from hallutracer_research.paper.diagnostics.shape import Shrinkage
from probes_store.store import SHIPPED
from service.demo.questions import questions
from service.errors import DataError, TrainingError
from service.fitting.scores import auroc
from tests.command_line import ended, hallutracer, one_line_says, run
from tests.kit.reseal import without_in_evaluation
from tests.kit.tables import lines
from tests.research.data.samples import write_lines
from tests.research.made import unit_rows

KEYS = {
    "fisher": {"theta", "chi", "t", "r_fisher", "r_fisher_direct"},
    "snr": {"rho", "gamma", "r_plugin", "r_empirical", "eta"},
    "variance": {"icc", "icc_factual", "icc_hallucinated", "residual_acf"},
    "chen_qin": {"statistic", "energy_ratio", "p_value", "layers_significant"},
}


BARE: dict[str, None] = dict.fromkeys(("group", "readout", "direction"))


def diagnose(path: Path, shrinkage: Shrinkage = None) -> dict[str, Any]:
    return diagnose_set(read_set(path), shrinkage)


def arrays(n: int = 120, m: int = 9, d: int = 6, seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    label = np.arange(n) % 3 // 2
    direction = unit_rows(rng.standard_normal((m, d)))
    readout = (
        rng.standard_normal((n, m, d))
        + (rng.standard_normal(n) + 1.5 * label)[:, None, None] * direction
    )
    return {
        "trajectory": np.einsum("nld,ld->nl", readout, direction) + rng.standard_normal(m),
        "label": label,
        "group": np.array([f"q{row // 4}" for row in range(n)]),
        "readout": readout.astype(np.float32),
        "direction": direction,
    }


def saved(folder: Path, **changed: Any) -> Path:
    """The arrays above with some replaced, or left out where None is given."""
    path = folder / "set.npz"
    kept = {name: value for name, value in {**arrays(), **changed}.items() if value is not None}
    np.savez(path, **kept)
    return path


def test_sections_come_with_what_a_file_has(tmp_path: Path) -> None:
    document = diagnose(saved(tmp_path, **BARE))
    whole = diagnose(saved(tmp_path))
    data = arrays()
    assert set(document) == {"fisher", "snr", "variance", "features"}
    assert set(whole) == {*document, "geometry", "chen_qin"}
    for section in whole:
        assert KEYS.get(section, set()) <= set(whole[section])
    assert document["features"]["mean"] == auroc(data["label"], data["trajectory"].mean(axis=1))
    assert document["features"]["mean"] > 0.7
    assert document["fisher"]["r_fisher"] == pytest.approx(
        document["fisher"]["r_fisher_direct"], rel=1e-9
    )
    assert len(document["variance"]["residual_acf"]) == 7
    test, geometry = whole["chen_qin"], whole["geometry"]
    assert len(test["statistic"]) == len(test["energy_ratio"]) == len(test["p_value"]) == 9
    assert test["layers_significant"] == sum(p < 0.05 for p in test["p_value"]) >= 6
    assert test["notes"] == ["one row of each group, 30 of 120: the test is for independent rows"]
    assert len(geometry["by_layer"]["adjacent_cos"]) == 8
    assert geometry["kappa"]["transitions"] > 0
    assert geometry["isotropy"]["dim"] == 6
    assert whole["variance"]["groups"] == 30
    assert not any("not direction . readout" in note for note in geometry["notes"])
    json.dumps([document, whole], allow_nan=False)
    half = {"label": data["label"].astype(bool), "readout": data["readout"].astype(np.float16)}
    assert diagnose(saved(tmp_path, **half, group=np.arange(120)))["features"] == whole["features"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_up_to_the_limit_overflow_nowhere(tmp_path: Path, dtype: type) -> None:
    """Scale-free numbers are those of the same arrays at an ordinary scale."""
    data, ordinary = arrays(), diagnose(saved(tmp_path))
    factor = 0.999 * LIMIT / max(np.abs(data[name]).max() for name in ("trajectory", "readout"))
    large = {
        name: (data[name].astype(np.float64) * factor).astype(dtype)
        for name in ("trajectory", "readout")
    }
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = diagnose(saved(tmp_path, **large))
    assert found["features"] == ordinary["features"]
    for line in lines(
        """
        fisher r_fisher 1e-4
        snr rho 1e-4
        variance icc_unbiased 1e-4
        chen_qin p_value 1e-3
        geometry cohen_d 1e-3
        geometry r_w 1e-3
        geometry distance_correlation 1e-3
        geometry stable_rank 1e-3
        """
    ):
        section, key, rel = line.split()
        expected = pytest.approx(ordinary[section][key], rel=float(rel))
        assert found[section][key] == expected, key


def test_what_readouts_without_groups_or_directions_can_tell(tmp_path: Path) -> None:
    (note,) = diagnose(saved(tmp_path, group=None))["chen_qin"]["notes"]
    assert note.startswith("p-values are of independent rows")
    assert diagnose(saved(tmp_path, group=np.arange(120)))["chen_qin"]["notes"] == []
    document = diagnose(saved(tmp_path, direction=None))
    assert document["geometry"]["mean_shift_norm"] > 0
    assert document["geometry"]["energy_fraction"] is None
    assert document["chen_qin"]["layers"] == 9
    # of other trajectories
    document = diagnose(saved(tmp_path, direction=np.roll(arrays()["direction"], 1, axis=0)))
    assert any("not direction . readout" in note for note in document["geometry"]["notes"])


def without(name: str, place: Any, by: Any) -> dict[str, Any]:
    copy = np.array(arrays()[name], copy=True)
    copy[place] = by
    return {name: copy}


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"trajectory": None}, "trajectory: missing"),
    ({"label": None}, "label: missing"),
    ({"trajectory": np.zeros((120, 2))}, r"trajectory: shape \[120, 2\], .* at least 3 layers"),
    ({"trajectory": np.zeros(120)}, r"trajectory: shape \[120\]"),
    ({"label": np.zeros(119, int)}, r"label: shape \[119\], \[120\] is needed"),
    ({"label": np.ones(120, int)}, r"label: 0 rows are 0 \(hallucinated\), at least 3"),
    ({"label": np.arange(120) % 3}, r"label: holds \[2\]"),
    ({"label": np.full(120, np.nan)}, r"label: holds \[nan"),
    ({"label": np.array(["factual", "no"] * 60)}, "label: holds <U7"),
    ({"group": np.arange(3)}, r"group: shape \[3\]"),
    ({"readout": np.zeros((120, 8, 6))}, r"readout: shape \[120, 8, 6\], \[120, 9, d\]"),
    ({"direction": np.zeros((9, 5))}, r"direction: shape \[9, 5\], \[9, 6\] is needed"),
    ({"direction": 3 * arrays()["direction"]}, "direction: row .* has length 3"),
    ({"readout": None}, "direction: is of use with readout"),
    (without("trajectory", (3, 4), np.nan), "trajectory: 1 numbers are not finite"),
    (without("readout", (0, 0), np.inf), "readout: 6 numbers are not finite"),
    (without("trajectory", (3, 4), -1e200), r"trajectory: 1 numbers are larger than 1e\+30"),
    (without("readout", (0, 0, 0), 3e38), r"readout: 1 numbers are larger than 1e\+30"),
    (
        {"trajectory": np.array([["a"]], dtype=object)},
        "trajectory: cannot be read without unpickling",
    ),
]


@pytest.mark.parametrize(("change", "said"), FAULTS, ids=[said[:40] for _, said in FAULTS])
def test_faults_are_named_with_their_array(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        diagnose(saved(tmp_path, **change))


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    text, bare, cut = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npz"
    text.write_text("trajectory")
    with bare.open("wb") as file:
        np.save(file, np.zeros(3))
    cut.write_bytes(saved(tmp_path).read_bytes()[:2000])
    for path, said in (
        (text, "no NumPy file"),
        (bare, "one bare array"),
        (cut, "not a readable .npz"),
    ):
        with pytest.raises(DataError, match=said):
            diagnose(path)


def test_few_rows_ask_for_shrinkage_and_take_it(tmp_path: Path) -> None:
    data, path = arrays(n=9, m=12), tmp_path / "few.npz"
    np.savez(path, trajectory=data["trajectory"], label=data["label"])
    with pytest.raises(TrainingError, match="singular.*--shrinkage ledoit_wolf"):
        diagnose(path)
    assert diagnose(path, "ledoit_wolf")["fisher"]["shrinkage_rule"] == "ledoit_wolf"
    assert [run("diagnose", str(path), "--shrinkage", rule) for rule in ("0.5", "much")] == [0, 2]


def test_the_command_prints_tables_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = saved(tmp_path, extra=np.zeros(2)), tmp_path / "out.json"
    assert run("diagnose", str(path), "--output", str(out)) == 0
    captured, written = capsys.readouterr(), json.loads(out.read_text())
    assert written == diagnose(path)
    for shown in (
        f"{written['fisher']['r_fisher']:.3f}",
        "Chen-Qin",
        "Probe isotropy",
        "residual correlation by lag",
        "120 trajectories of 9 layers: 40 factual, 80 hallucinated",
    ):
        assert shown in captured.out
    assert "ignored arrays: extra" in captured.err


def demo_rows(folder: Path, split: str, count: int) -> Path:
    rows = [
        {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
        for row in questions(split)[:count]
    ]
    return write_lines(folder / f"{split}.jsonl", rows)


def by_bundle(folder: Path, rows: Path, *more: str, bundle: str = "demo") -> CompletedProcess[str]:
    run_dir = str(folder / "run")
    command = ("diagnose", "--bundle", bundle, "--data", str(rows), "--run-dir", run_dir)
    return hallutracer(*command, *more)


def test_a_bundle_and_rows_are_enough(tmp_path: Path) -> None:
    """The same numbers as from arrays that were scored by hand."""
    rows = demo_rows(tmp_path, "dev", 120)
    out = tmp_path / "found.json"
    done = by_bundle(tmp_path, rows, "--labels", "given", "--output", str(out))
    assert "120 trajectories of 8 layers" in ended(done, 0)
    assert "does not record its training rows" not in done.stderr
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    with ht.load("demo", report=lambda line: None) as detector:
        risks = detector.score([row["prompt"] for row in read])
        direction = detector.bundle.probes.direction
    np.savez(
        tmp_path / "by-hand.npz",
        trajectory=risks.trajectory,
        label=[row["label"] for row in read],
        group=[row["group"] for row in read],
    )
    by_hand, found = diagnose(tmp_path / "by-hand.npz"), json.loads(out.read_text())
    assert found["features"] == pytest.approx(by_hand["features"], abs=1e-3)
    assert found["fisher"]["r_fisher"] == pytest.approx(by_hand["fisher"]["r_fisher"], rel=1e-2)
    assert found["geometry"]["isotropy"]["dim"] == direction.shape[1]
    assert not any("not direction . readout" in note for note in found["geometry"]["notes"])


def test_rows_that_the_bundle_was_fitted_on_are_told(tmp_path: Path) -> None:
    rows, fresh = demo_rows(tmp_path, "train", 400), demo_rows(tmp_path, "dev", 120)
    store, quiet = tmp_path / "store", {"report": lambda line: None}
    options: dict[str, Any] = {"evaluate": False, "seeds": (0,), "folds": 2, "c": 0.1, "jobs": 1}
    ht.train(rows, "mine", "demo", store=store, run_dir=tmp_path / "run", **options, **quiet)
    old, new = (
        by_bundle(tmp_path, file, "--store", str(store), bundle="mine").stderr
        for file in (rows, fresh)
    )
    assert "mine:1 was fitted on 400 of the 400 rows: everything here is too good" in old
    assert "fitted on" not in new


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give an .npz file, or --bundle NAME with --data"),
        ("x.npz --data y.jsonl", "give an .npz file, or"),
        ("--data y.jsonl", "--bundle: name the bundle"),
        (
            "--data y.jsonl --bundle demo --model ./nope",
            "there is no folder or GGUF file ./nope",
        ),
    ],
)
def test_what_is_missing_is_named(arguments: str, message: str) -> None:
    one_line_says(f"diagnose {arguments}", 2, message)


def test_a_bundle_that_does_not_record_its_rows_says_so_and_rows_that_ask_for_no_fact_are_refused(
    tmp_path: Path,
) -> None:
    rows, labels = demo_rows(tmp_path, "dev", 40), ("--labels", "given")
    with rows.open("a") as file:
        file.write('\n{"prompt": "Write a poem.", "applies": false}')
    ended(by_bundle(tmp_path, rows, *labels), 1, 'line 41: "applies" is false')
    assert not (tmp_path / "run").exists()
    rows = demo_rows(tmp_path, "dev", 60)
    without_in_evaluation(SHIPPED / "demo" / "1", tmp_path / "store" / "demo" / "1", "rows_seen")
    done = by_bundle(tmp_path, rows, *labels, "--store", str(tmp_path / "store"))
    ended(done, 0, "demo:1 does not record its training rows")
