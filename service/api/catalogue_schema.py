"""What is said of the model, the bundles and the service's state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from service.api.request_schema import Risk, Strict


class ModelCard(Strict):
    """The loaded model, as OpenAI lists models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hallutracer"
    architecture: str
    revision: str
    dtype: str
    max_model_len: int
    bundles: list[str] = Field(description="references of the loaded bundles, the default first")
    root: str = Field(description="the model's own name; `id` may be one of --served-model-name")


class ModelList(Strict):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class BundleGuarantee(Strict):
    """What the threshold of a bundle promises; the statement says for whom, and when it is void."""

    alpha: float
    delta: float
    threshold: float
    groups: int
    hallucinated: int
    p_value: float
    answered: float
    risk_control_threshold: float | None
    rows: int
    all_groups: int
    data_digest: str
    labels: str
    judge: str | None
    dtype: str
    seed: int
    statement: str


class BundleInterval(Strict):
    """How wide an interval of the risk is: see the bundle format."""

    level: float
    fits: int
    centre: float
    base: float
    by_log_odds: float
    by_distance: float


class BundleUncertainty(Strict):
    """What a bundle knows of its risks' uncertainty; the statement says what it means."""

    outside_share: float
    outside_rows: int
    interval: BundleInterval | None
    statement: str


class BundleApplicability(Strict):
    """Where P(asks) is below the threshold, a prompt asks for no fact; the statement says what it means."""

    threshold: float
    questions_below: float = Field(description="share of the training questions that are taken for no question")
    others_above: float = Field(description="share of the other training prompts that are taken for questions")
    statement: str


Role = Literal["default", "canary", "shadow", "none"]


class GoldenOut(Strict):
    """The golden prompts, replayed when the bundle was loaded: the largest deviation from what was recorded."""

    risk: float
    risk_tolerance: float
    trajectory: float = Field(description="in units of the trajectories' spread")
    trajectory_tolerance: float


class ComparedOut(Strict):
    """A shadow beside the bundles that judged the same prompts, in this process."""

    prompts: int
    stricter: int = Field(description="prompts that it alone flags")
    looser: int = Field(description="prompts that it alone does not flag")
    failed: int = Field(description="prompts of which it gave no number")
    disagreement: float | None = Field(description="share that was not agreed on, failures included")
    mean_difference: float | None = Field(description="of the two risks, absolute")


class DriftOut(Strict):
    """The newest window of prompts that this bundle judged, beside its training rows."""

    prompts: int = Field(description="different ones, the newest")
    independent: float = Field(description="prompts that tell as much, since neighbours are alike; limits follow it")
    ks: float = Field(description="largest distance of the two distribution functions of the risk")
    psi: float = Field(description="population stability index over the tenths of training")
    shift: float = Field(description="mean risk of the window less that of training")
    outside: float | None = Field(description="share of prompts outside training; null where the bundle cannot tell")


class LabelsOut(Strict):
    """Answers that were drawn at random under this bundle, one for each different prompt, up to the newest label."""

    drawn: int
    labelled: int = Field(description="of these; the others are taken for right")
    wrong: int


class LeftOut(Strict):
    """A bundle that was asked for and is not used."""

    reference: str
    reason: str


class LoadedOut(Strict):
    """When the bundles were loaded, and what could not be."""

    since: str = Field(description="when the loaded bundles began to serve, UTC")
    left_out: list[LeftOut]
    reload_error: str | None = Field(description="why the newest reload changed nothing")
    reload_failing_since: str | None = Field(description="when the first reload failed since one was done, UTC")


class BundleCard(Strict):
    """A loaded bundle."""

    id: str = Field(description="name:version")
    object: Literal["bundle"] = "bundle"
    name: str
    version: int
    digest: str
    created: str
    model: str
    site: str = Field(description="where each layer is read: attention_head or residual_stream")
    logit_scale: str
    signals: list[str]
    prompt_format: str
    threshold: float
    guarantee: BundleGuarantee | None = None
    uncertainty: BundleUncertainty | None = None
    applicability: BundleApplicability | None = Field(
        None, description="tells prompts that ask for no fact; null where the bundle cannot"
    )
    guarantee_shapes: list[str] | None = Field(
        None, description="shapes of conversation that the guarantee was calibrated on; null where it does not say"
    )
    role: Role = Field(description="what it does for requests that name no bundle; none: nothing")
    share: float | None = Field(None, description="of these requests, that a default or a canary judges")
    compared: ComparedOut | None = Field(None, description="of a shadow, since the service started")
    golden: GoldenOut
    drift: DriftOut | None = Field(None, description="none before the first window, or without a reference")
    labels: LabelsOut | None = Field(None, description="what the guarantee is held against; none without both")
    void: list[str] = Field(description="why a guarantee does not hold just now, whatever the request")
    default: bool


class ClassTrajectories(Strict):
    """Where the truth logits of the training rows lie, out of fold, layer by layer."""

    factual: list[float] = Field(description="mean over the rows that the model answered right, one for each layer")
    hallucinated: list[float] = Field(description="the same over the rows that it answered wrong")
    factual_std: list[float]
    hallucinated_std: list[float]


class GateOut(Strict):
    """What answering below one threshold does, as shares of the training rows."""

    threshold: Risk
    answered: Risk
    wrong_among_answered: Risk | None = Field(description="null where nothing is answered")
    right_withheld: Risk = Field(description="of the rows that the model answers right")


class TenthOut(Strict):
    """A tenth of the training rows, ordered by risk."""

    low: Risk = Field(description="its smallest risk")
    high: Risk = Field(description="its largest")
    right: Risk = Field(description="share that the model answered right")


class CoverageOut(Strict):
    """What a bundle would answer and get wrong over thresholds, on questions like its training rows."""

    source: Literal["out_of_fold_risks", "own_threshold"] = Field(
        description="counted from the out-of-fold risks of the training rows; or nothing but the bundle's own "
        "threshold is known"
    )
    rows: int
    hallucinated: Risk = Field(description="share of the rows: what is wrong where everything is answered")
    gates: list[GateOut] = Field(description="at the thresholds 0, 0.01 ... 1; may be empty")
    own: GateOut | None = Field(description="measured at the bundle's own threshold, by cross-validation")
    tenths: list[TenthOut] = Field(
        description="lowest risks first; empty where the rows' risks were not kept, or are too few"
    )


class SampleQuestionOut(Strict):
    """A held-out question that the bundle carries."""

    prompt: str
    answers: list[str] = Field(description="accepted ones")
    kind: str = Field(description="'' where the data name none")


class SampleOut(Strict):
    """Held-out questions that were drawn before any risk was known: what the risk is worth, for a stranger to see."""

    file: str = Field(description="of the rows that they were drawn from")
    questions: list[SampleQuestionOut]


class SampleAnswerOut(Strict):
    """What the model answers to a question of the sample, judged, and the risk that was read before it."""

    object: Literal["sample.answer"] = "sample.answer"
    number: int = Field(description="of the question, from 0")
    prompt: str
    kind: str
    risk: Risk
    threshold: Risk
    flagged: bool = Field(description="what a gate would withhold")
    outside_training: bool | None = Field(description="null where the bundle cannot tell")
    answer: str
    verdict: Literal["right", "wrong", "abstained"]
    accepted: list[str] = Field(description="answers that are right")


class FormOut(Strict):
    """What a bundle's risk is worth on questions that were asked in one form of conversation."""

    form: str
    rows: int
    wrong: Risk = Field(description="share that the model answers wrong")
    mean_risk: Risk = Field(description="far from 'wrong', the risk is no probability in this form")
    calibration_error: Risk = Field(description="debiased")
    auroc: Risk | None = Field(description="null where the rows are of one class")
    answered: Risk | None = Field(description="null, as the next, where a calibration has set another threshold since")
    wrong_among_answered: Risk | None = Field(description="null where nothing is answered")


class FormsOut(Strict):
    """A bundle's risk by form of conversation."""

    source: Literal["held_out", "out_of_fold"] = Field(
        description="measured on held-out rows, or on the training rows by folds that never saw the row"
    )
    data: list[FormOut]


class BundleDetail(BundleCard):
    """GET /v1/bundles/{bundle}: the card, and what a picture of a risk needs."""

    trajectories: ClassTrajectories
    coverage: CoverageOut
    forms: FormsOut | None = Field(None, description="null where none is kept, and after a recalibration")
    sample: SampleOut | None = Field(None, description="null where the bundle carries none (train --no-sample)")


class BundleList(Strict):
    """GET /v1/bundles."""

    object: Literal["list"] = "list"
    data: list[BundleCard]
    policies: list[str] = Field(description="values of a request's 'policy', the default first")
    status: LoadedOut


class Status(Strict):
    """A health check's answer."""

    status: Literal["live", "ready"]
    model: str | None = None
    bundles: list[str] | None = None
    keys: str | None = None  # why the file of named keys, as it is now, is not in force
