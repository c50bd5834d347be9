"""Reads and writes the manifest, bundle.json: what a bundle is, for which model, and the sha256 of
its other files.

Only ``Manifest`` declares these fields in code; FIELDS.md documents them for other languages."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import attrgetter, getitem
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    StrictBool,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from probes_store import errors, records
from probes_store.errors import BadValue, DigestMismatch, MissingField
from probes_store.records import Filled, Natural, Positive, Record, Text, matching, require
from probes_store.syntax import HEX, NAME, NAMES, canonical_json, parse_json, readable_json

FORMAT: Final = "hallutracer-bundle"
FORMAT_VERSION: Final = 1
MAX_FILE = 64 * 1024 * 1024  # bytes of any file, since files are read whole
MANIFEST = "bundle.json"
PROBES = "probes.safetensors"
GOLDEN = "golden.safetensors"
EVALUATION = "evaluation.json"
CARD = "README.md"
REQUIRED = (PROBES, GOLDEN, EVALUATION, CARD)
ANSWER = (  # required if the manifest has the record ``answer``, else not allowed
    "answer.safetensors"
)
PLOT = re.compile(r"plots/[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.png")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TIME = "%Y-%m-%dT%H:%M:%SZ"
UNSET_TIME = "1970-01-01T00:00:00Z"

Signal = Literal["depth_mean", "log_max_prob", "entropy", "passage", "stated", "stated_length"]
FIRST_TOKEN_SIGNALS: tuple[Signal, Signal] = ("log_max_prob", "entropy")
SIGNALS: tuple[Signal, ...] = get_args(Signal)
SiteName = Literal["attention_head", "residual_stream"]
LogitScale = Literal[
    "unit_norm", "standardized", "joint", "weighted"
]  # only older trainers made "weighted"
Digest = Annotated[Text, matching(DIGEST, "sha256: and 64 hex digits")]
LOCAL = "local"  # the revision of a folder or file, which has no commit


def _time(text: str) -> str:
    with suppress(ValueError):
        if datetime.strptime(text, TIME).strftime(TIME) == text:
            return text
    raise ValueError("UTC time like 2026-01-31T12:00:00Z")


def _template_arguments(value: object) -> dict[str, records.TemplateArgument] | None:
    if value is None:
        return None
    if arguments := records.template_arguments(value):
        return arguments
    raise ValueError("at least one argument, or no such field")


@dataclass(frozen=True)
class ModelRecord(Record):
    """The model that the probes were trained on."""

    name: Filled  # the name that the trainer got; for people only, since a folder may move
    revision: Filled  # hub commit, or LOCAL
    fingerprint: Filled  # over the configuration and the weight files
    architecture: Filled  # e.g. LlamaForCausalLM
    model_type: Filled  # e.g. llama
    num_layers: Positive
    num_heads: Positive  # query heads
    head_dim: Positive
    hidden_size: Positive
    adapter: Filled | None = None  # digest over its adapter; absent in the file if there was none


@dataclass(frozen=True)
class TokenizerRecord(Record):
    """The tokenizer."""

    digest: Filled  # over its own serialisation


@dataclass(frozen=True)
class ChatTemplateRecord(Record):
    """The chat template."""

    digest: Filled | None  # None if the tokenizer has no template
    # Its arguments besides messages and tools, such as enable_thinking; absent in the file if there
    # are none.
    arguments: Annotated[
        dict[str, records.TemplateArgument] | None, PlainValidator(_template_arguments)
    ] = None


@dataclass(frozen=True)
class ReadoutRecord(Record):
    """Where a_l is taken (Eq. readout)."""

    site: SiteName
    position: Literal["last"]  # the answer onset t*


@dataclass(frozen=True)
class Classifier(Record):
    """risk = 1 - sigmoid(weight . signals + intercept)."""

    weight: tuple[records.Real, ...]  # one for each of the signals, in their order
    intercept: records.Real


@dataclass(frozen=True)
class TrainingRecord(Record):
    """The data and the settings of the training run."""

    data_digest: Filled
    rows: records.AtLeast2  # rows of the data file
    factual: Positive  # rows of class 1 that took part
    hallucinated: Positive  # rows of class 0 that took part
    left_out: Natural  # rows without a usable label
    groups: Positive  # questions or entities that folds keep together
    labels: records.TrainingLabels
    judge: Text | None  # the judge of generated answers
    seeds: Annotated[tuple[records.Int, ...], Field(min_length=1)]
    folds: records.AtLeast2
    c: records.AboveZero  # inverse strength of the probes' regularisation
    c_grid: tuple[records.AboveZero, ...]  # the candidates for c; empty if c was given
    class_balance: Filled
    hallutracer_version: Filled
    decoding: records.Decoding | None = None  # of the labelled answers; absent if unknown
    shapes: tuple[Filled, ...] | None = None  # of the rows' conversations; absent if unknown
    scripts: tuple[Filled, ...] | None = None  # of the rows' last questions; absent if unknown
    reworded: Positive | None = (
        None  # rows that ask a lone question in other words; absent if there were too few
    )
    # With labels by the model itself: its sampled answers to each question, and their temperature;
    # absent with other labels.
    samples: Positive | None = None
    sample_temperature: records.AboveZero | None = None

    @model_validator(mode="after")
    def _relations(self) -> Self:
        used = self.factual + self.hallucinated
        require(used <= self.rows, "rows", f"at least factual + hallucinated = {used}", self.rows)
        for name, values in (("shapes", self.shapes), ("scripts", self.scripts)):
            fine = values is None or 0 < len(values) == len(set(values))
            require(fine, name, "one or more, each once", values)
        return self


@dataclass(frozen=True)
class FileRecord(Record):
    """One other file of the bundle."""

    bytes: Annotated[Natural, Field(le=MAX_FILE)]
    sha256: Annotated[Text, matching(HEX, "64 hex digits")]


def record_of(data: bytes) -> FileRecord:
    """Return the record of a file with these bytes."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """bundle.json.  Fields with a default are set on publishing, or null; a file must have every
    field."""

    format: Literal["hallutracer-bundle"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    name: Annotated[Text, matching(NAME, NAMES)]
    version: Positive = 1
    created: Annotated[Text, AfterValidator(_time)] = UNSET_TIME
    digest: Digest = ""  # digest of the content, see ``with_seal``
    seal: Digest = ""  # digest of this file
    model: ModelRecord
    tokenizer: TokenizerRecord
    chat_template: ChatTemplateRecord
    prompt_format: Literal["chat", "text"]  # how a bare prompt string is rendered
    dtype: records.DType  # of the training extraction
    readout: ReadoutRecord
    logit_scale: LogitScale
    signals: tuple[Signal, ...]  # depth_mean first
    classifier: Classifier
    # By cost, t = 1 / (1 + K), or by a target, on out-of-fold training risks; with a guarantee, the
    # guaranteed one.
    threshold: records.Share
    guarantee: records.Guarantee | None = None
    uncertainty: records.Uncertainty
    recalibration: records.Recalibration | None = None
    context: records.Context | None = None
    answer: records.AnswerProbe | None = None  # absent in the file if there is none
    guarantee_shapes: tuple[Filled, ...] | None = (
        None  # shapes of the conversations in the calibration
    )
    # The guarantee is for a policy with recheck, which also reads the answers' own tokens; absent
    # for other policies.
    guarantee_reads_answers: StrictBool | None = None
    # The guarantee for each kind of question that was tested separately; absent if none was.
    guarantee_strata: tuple[records.GuaranteeStratum, ...] | None = None
    training: TrainingRecord
    files: dict[Text, FileRecord] = dataclasses.field(
        default_factory=dict
    )  # relative name -> size and hash

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"

    @property
    def decoding(self) -> records.Decoding | None:
        """Return how the answers were decoded that the risk is about; None if that is not recorded.

        Answers that a training run generates have always been greedy, also before bundles recorded
        it."""
        recorded = self.training.decoding
        return records.GREEDY if recorded is None and self.training.labels != "given" else recorded

    @property
    def calibrated_decoding(self) -> records.Decoding:
        """Return how the answers of the guarantee's calibration were decoded; greedy if that is not
        recorded."""
        generated = self.guarantee is not None and self.guarantee.labels == "generate"
        return records.GREEDY if generated else self.decoding or records.GREEDY

    def stratum(self, passage: bool | None) -> records.GuaranteeStratum | None:
        """Return the guarantee for questions with or without a passage; None if they have no
        separate one.

        ``passage`` is None if it is unknown whether a passage stands beside the question."""
        return next(
            (stratum for stratum in self.guarantee_strata or () if stratum.passage is passage), None
        )

    def threshold_for(self, passage: bool | None) -> float:
        """Return the risk from which on such a prompt is flagged; the strictest if its stratum is
        unknown."""
        stratum = self.stratum(passage)
        return self.threshold if stratum is None else stratum.threshold

    @property
    def loosest_threshold(self) -> float:
        """Return the largest risk from which on any prompt is flagged."""
        return max(
            [self.threshold, *(stratum.threshold for stratum in self.guarantee_strata or ())]
        )

    @property
    def probe_dim(self) -> int:
        """d, the length of one probe direction."""
        return (
            self.model.head_dim if self.readout.site == "attention_head" else self.model.hidden_size
        )

    @property
    def probe_heads(self) -> int:
        """Number of heads that a probe may read: K, or 1 at the residual stream."""
        return self.model.num_heads if self.readout.site == "attention_head" else 1

    @property
    def needs_first_token(self) -> bool:
        """Whether the classifier reads the first token's distribution."""
        return any(name in self.signals for name in FIRST_TOKEN_SIGNALS)

    @property
    def context_probes(self) -> int:
        """A, the number of probes besides the risk's own."""
        return 0 if self.context is None else len(self.context.probes)

    @property
    def tells_outside(self) -> bool:
        """Whether its reference covers context probes, too; without them it misses most unusual
        prompts."""
        return self.context is not None

    @property
    def logits(self) -> int:
        """(1 + A) m: the truth logits of a prompt, then those of each context probe."""
        return self.model.num_layers * (1 + self.context_probes)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        signals, weight = self.signals, self.classifier.weight
        guarantee, shapes = self.guarantee, self.guarantee_shapes
        fine = signals[:1] == ("depth_mean",) and len(set(signals)) == len(signals)
        require(fine, "signals", "depth_mean first and none twice", signals)
        fine, expected = len(weight) == len(signals), f"[{len(signals)}], one for each signal"
        require(fine, "classifier.weight", expected, f"[{len(weight)}]", "wrong_shape")
        if guarantee is None:  # a guarantee may let nothing or everything through
            require(
                0.0 < self.threshold < 1.0, "threshold", "a number between 0 and 1", self.threshold
            )
        elif guarantee.threshold != self.threshold:
            require(
                False,
                "guarantee.threshold",
                f"the threshold, {self.threshold}",
                guarantee.threshold,
            )
        if shapes is not None:
            fine = guarantee is not None and 0 < len(shapes) == len(set(shapes))
            require(
                fine,
                "guarantee_shapes",
                "one or more, each once, and null without a guarantee",
                shapes,
            )
        if (reads := self.guarantee_reads_answers) is not None:
            fine = reads and guarantee is not None and self.answer is not None
            require(
                fine,
                "guarantee_reads_answers",
                "true, a guarantee and the record answer beside it",
                reads,
            )
        if (strata := self.guarantee_strata) is not None:
            self._check_strata(strata)
        probes = {probe.name for probe in self.context.probes} if self.context is not None else None
        for name in signals:
            needed = records.CONTEXT_NEEDS.get(name, set())
            field = "context" if probes is None else "context.probes"
            require(
                needed <= (probes or set()),
                field,
                f"the probes {sorted(needed)} of the signal {name}",
                probes,
            )
        required = REQUIRED if self.answer is None else (*REQUIRED, ANSWER)
        for file in required:
            require(
                file in self.files,
                f"files.{file}",
                "a file that this bundle must have",
                None,
                "missing",
            )
        for file in self.files:
            fine = file in required or bool(PLOT.fullmatch(file))
            require(fine, f"files.{file}", "", None, "unexpected_keyword_argument")
        return self

    def _check_strata(self, strata: tuple[records.GuaranteeStratum, ...]) -> None:
        kinds = [stratum.passage for stratum in strata]
        fine = self.guarantee is not None and 0 < len(kinds) == len(set(kinds))
        require(
            fine,
            "guarantee_strata",
            "with a passage, without one, or both, and a guarantee beside them",
            kinds,
        )
        thresholds = [stratum.threshold for stratum in strata]
        strictest = f"the least of its strata, {min(thresholds)}"
        require(self.threshold == min(thresholds), "threshold", strictest, self.threshold)


# Fields of later releases -> their content. They are absent if they are None, so older bundles keep
# their bytes.
_LATER: Final[Mapping[str, str]] = {
    "model.adapter": "a digest",
    "answer": "a record",
    "guarantee_reads_answers": "true",
    "guarantee_strata": "a list of records",
    "training.decoding": "a record",
    "training.shapes": "a list of texts",
    "training.scripts": "a list of texts",
    "training.reworded": "a count",
    "training.samples": "a count",
    "training.sample_temperature": "a number",
    "chat_template.arguments": "a record",
}


def _holder(document: Any, field: str) -> tuple[dict[str, Any], str]:
    """Return the record in bundle.json's values that has this field, and the field's name in it."""
    *where, name = field.split(".")
    return reduce(getitem, where, document), name


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the only bytes that bundle.json of this manifest may have."""
    return readable_json(as_document(manifest))


def as_document(manifest: Manifest) -> dict[str, Any]:
    """Return bundle.json's values."""
    document = dataclasses.asdict(manifest)
    for field in _LATER:
        record, name = _holder(document, field)
        if record[name] is None:
            del record[name]
    return document


def with_seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return bundle.json's values with their digest and seal.

    digest: over all values except version, created, digest and seal; by ``files`` it covers every
    byte of the other files.  seal: over all values except itself."""
    result = dict(document)
    for field, left_out in (
        ("digest", ("version", "created", "digest", "seal")),
        ("seal", ("seal",)),
    ):
        content = canonical_json(
            {key: value for key, value in result.items() if key not in left_out}
        )
        result[field] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return result


def sealed(manifest: Manifest, *, version: int = 1, created: str = UNSET_TIME) -> Manifest:
    """Return the same content under a version and a time, with digest and seal.  Raises what
    ``read_record`` raises."""
    document = as_document(manifest) | {"version": version, "created": created}
    return read_record(with_seal(document), MANIFEST)


def read_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Read the bytes of bundle.json; ``file`` is its name in messages.

    Raises a subclass of BundleDamaged: Truncated, BadValue, NotFinite, UnknownField, MissingField
    or WrongShape for an invalid field, DigestMismatch if all fields are valid but one was changed
    after publishing."""
    document = parse_json(data, file)
    if (
        isinstance(document, dict)
        and "format_version" in document
        and document.get("format") == FORMAT
    ):
        version = document["format_version"]
        if (
            type(version) is not int or version != FORMAT_VERSION
        ):  # first, since other formats have other fields
            raise BadValue(
                "a format that this release does not read",
                file=file,
                field="format_version",
                expected=FORMAT_VERSION,
                found=repr(version),
                cure="Train and publish it anew",
            )
    manifest = read_record(document, file)
    right, whole = with_seal(document), readable_json(document)
    for field in ("digest", "seal"):
        if (recorded := document[field]) != right[field]:
            raise DigestMismatch(
                "the manifest was changed",
                file=file,
                field=field,
                expected=right[field],
                found=recorded,
            )
    if data == whole:
        return manifest
    if whole.startswith(data):
        raise errors.Truncated(
            "the end is missing", file=file, expected=f"{len(whole)} bytes", found=len(data)
        )
    raise DigestMismatch(
        "the manifest was reformatted",
        file=file,
        field="seal",
        expected="the bytes that publishing wrote",
        found="other white space or spelling",
    )


_ADAPTER = TypeAdapter(Manifest)
_PROBLEMS = {
    "unexpected_keyword_argument": (errors.UnknownField, "this format has no such field or file"),
    "missing": (MissingField, "the field is missing"),
    "finite_number": (errors.NotFinite, "not finite"),
    "wrong_shape": (errors.WrongShape, "another length"),
}


def read_record(document: Any, file: str) -> Manifest:
    """Check every value of bundle.json.  Raises BadValue, NotFinite, UnknownField, MissingField and
    WrongShape."""
    inner = document.get("recalibration") if isinstance(document, dict) else None
    for kind, where, part in (
        (Manifest, "", document),
        (records.Recalibration, "recalibration.", inner),
    ):
        for field in dataclasses.fields(
            kind
        ):  # a file must state even the fields that have defaults in code
            path = f"{where}{field.name}"
            if isinstance(part, dict) and field.name not in part and path not in _LATER:
                raise MissingField("the field is missing", file=file, field=path)
    try:
        manifest = _ADAPTER.validate_python(document)
        for path, what in _LATER.items():
            record, name = _holder(document, path)
            if name in record and record[name] is None:
                raise BadValue(
                    "bad value",
                    file=file,
                    field=path,
                    expected=f"{what}, or no such field",
                    found=None,
                )
        return manifest
    except (
        ValidationError
    ) as error:  # report the first problem, but missing and unknown fields before bad values
        first = min(
            error.errors(), key=lambda fault: [*_PROBLEMS, fault["type"]].index(fault["type"])
        )
    context = first.get("ctx", {})
    parts = [*first["loc"], *([context["field"]] if context.get("field") else [])]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts
    ).removeprefix(".")
    error_kind, problem = _PROBLEMS.get(first["type"], (BadValue, "bad value"))
    if error_kind in (errors.UnknownField, MissingField):
        raise error_kind(problem, file=file, field=path)
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    value = ascii(context.get("found", first["input"]))
    raise error_kind(
        problem, file=file, field=path or "the whole file", expected=expected, found=value
    )


# Field of the manifest -> attribute of an engine, the error, the difference.
_IDENTITY: Final[Mapping[str, tuple[str, type[errors.BundleRefused], str]]] = {
    "model.architecture": ("architecture", errors.WrongModel, "another architecture"),
    "model.fingerprint": (
        "fingerprint",
        errors.WrongModel,
        "other weights, or weights and caches of other types",
    ),
    "model.adapter": ("adapter", errors.WrongModel, "another adapter"),
    "model.num_layers": ("geometry.num_layers", errors.WrongGeometry, "another shape"),
    "model.num_heads": ("geometry.num_heads", errors.WrongGeometry, "another shape"),
    "model.head_dim": ("geometry.head_dim", errors.WrongGeometry, "another shape"),
    "model.hidden_size": ("geometry.hidden_size", errors.WrongGeometry, "another shape"),
    "tokenizer.digest": ("tokenizer", errors.WrongTokenizer, "another tokenizer"),
    "chat_template.digest": ("chat_template", errors.WrongChatTemplate, "another chat template"),
    "chat_template.arguments": (
        "template_arguments",
        errors.WrongChatTemplate,
        "other arguments of the chat template",
    ),
}


def another_commit(manifest: Manifest, model: str, revision: str) -> errors.WrongRevision | None:
    """Return the error for other weights if the loaded model is another commit of the same hub
    model; else None.

    A folder has no commit, and the commits of a model with another name cannot be compared."""
    trained = manifest.model
    if (
        model != trained.name
        or LOCAL in (revision, trained.revision)
        or revision == trained.revision
    ):
        return None
    cure = f"Load that commit (--revision {trained.revision}), or train a bundle for what is loaded"
    problem = (
        f"bundle {manifest.reference} was trained on {trained.name} at revision {trained.revision},"
        " with other weights"
    )
    return errors.WrongRevision(
        problem, field="model.revision", expected=trained.revision, found=revision, cure=cure
    )


def check_identity(manifest: Manifest, loaded: Any) -> None:
    """Refuse a model that the bundle was not trained on; ``loaded`` is the identity that an engine
    reports.

    Raises the error of the first difference, in the order of ``_IDENTITY``.  The name may differ,
    and also the revision if the weights are the same."""
    at = f"{manifest.model.name} at revision {manifest.model.revision}"
    for field, (attribute, error, difference) in _IDENTITY.items():
        expected, actual = attrgetter(field)(manifest), attrgetter(attribute)(loaded)
        if expected != actual:
            if attribute == "fingerprint" and (
                wrong_revision := another_commit(manifest, loaded.model, loaded.revision)
            ):
                raise wrong_revision
            of_model = field.startswith("model.") and attribute != "adapter"
            what = "" if of_model else f"the {attribute.replace('_', ' ')} of "
            expected, actual = ("none" if value is None else value for value in (expected, actual))
            cure = f"Load {what}{at}, or train a bundle for what is loaded"
            if (
                attribute == "template_arguments"
            ):  # a loaded model renders all chats with the same arguments
                cure = (
                    f"Serve it by a process of its own, which loads {at} with them, "
                    "or train a bundle with the arguments of the first one"
                )
            raise error(
                f"bundle {manifest.reference} was trained on {difference}",
                field=field,
                expected=expected,
                found=actual,
                cure=cure,
            )
