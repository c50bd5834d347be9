"""A scripted engine with a bundle that matches it: for tests of the HTTP layer and of scoring."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from probes_store.bundle import Bundle, BundleDraft
from probes_store.manifest import Classifier
from probes_store.tensors import Golden
from service.engines.base import LoadedModel
from service.readout import Probes, Site
from service.risk import depth_mean, risk
from service.trainer.publish import model_record
from tests.probes_store.factory import make_draft, write_bundle
from tests.scripted_engine import ScriptedEngine

GOLDEN = [[256, 65, 66], [256, 67]]
WEIGHT, INTERCEPT = 2.0, 0.1


def matching_draft(
    engine: LoadedModel, name: str, seed: int, prompts: list[list[int]] = GOLDEN, **changes: Any
) -> BundleDraft:
    """Random probes for ``engine``, with golden ``prompts`` recorded through ``engine.score``."""
    identity = engine.identity
    draft = make_draft(
        seed,
        name=name,
        model=model_record(identity),
        tokenizer=identity.tokenizer,
        chat_template=identity.chat_template,
        dtype=identity.dtype,
        **{"classifier": Classifier((WEIGHT,), INTERCEPT)} | changes,
    )
    tensors = draft.probes
    probes = Probes(Site.ATTENTION_HEAD, tensors.head, tensors.direction, tensors.bias, tensors.scale)
    trajectory = np.stack([onset.trajectories[0] for onset in engine.score(prompts, [probes])])
    risks = risk(depth_mean(trajectory)[:, None], np.array([WEIGHT]), INTERCEPT)
    if "golden" not in changes:
        draft.golden = Golden.record(prompts, trajectory, risks, None)
    return draft


def matching_bundle(engine: LoadedModel, folder: Path, name: str = "tiny", seed: int = 0, **changes: Any) -> Bundle:
    """A bundle folder of such a draft."""
    return write_bundle(matching_draft(engine, name, seed, **changes), folder / name)


def scripted(tmp_path: Path, **options: object) -> tuple[ScriptedEngine, Bundle]:
    """A script and a bundle of its own; ``Scheduled`` makes an engine of the script."""
    script = ScriptedEngine(**options)  # type: ignore[arg-type]
    return script, matching_bundle(script, tmp_path)


class Held:
    """A script's ``before`` that stands still inside a forward pass until ``release`` is set."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, _: str) -> None:
        self.entered.set()
        assert self.release.wait(30)
