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
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    TypeAdapter,
    ValidationError,
)

from probes_store import errors
from probes_store.errors import BadValue, DigestMismatch, MissingField, UnknownField, located
from probes_store.records import (
    CONTEXT_NEEDS,
    GREEDY,
    AboveZero,
    AnswerProbe,
    AtLeast2,
    Context,
    Decoding,
    DType,
    Filled,
    Guarantee,
    GuaranteeStratum,
    Int,
    Name,
    Names,
    Natural,
    Positive,
    Real,
    Recalibration,
    Record,
    Share,
    TemplateArgument,
    Text,
    TrainingLabels,
    Uncertainty,
    distinct,
    passing,
    template_arguments,
)
from probes_store.syntax import HEX, canonical_json, parse_json, plain, readable_json

FORMAT: Final = "hallutracer-bundle"
FORMAT_VERSION: Final = 1
MAX_FILE = 64 * 1024 * 1024  # bytes of any file, since files are read whole
MANIFEST = "bundle.json"
PROBES = "probes.safetensors"
GOLDEN = "golden.safetensors"
EVALUATION = "evaluation.json"
CARD = "README.md"
REQUIRED = (PROBES, GOLDEN, EVALUATION, CARD)
# Required if the manifest has the record ``answer``, else not allowed.
ANSWER = "answer.safetensors"
PLOT = re.compile(r"plots/[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.png")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TIME = "%Y-%m-%dT%H:%M:%SZ"
UNSET_TIME = "1970-01-01T00:00:00Z"

Signal = Literal["depth_mean", "log_max_prob", "entropy", "passage", "stated", "stated_length"]
FIRST_TOKEN_SIGNALS: tuple[Signal, Signal] = ("log_max_prob", "entropy")
SIGNALS: tuple[Signal, ...] = get_args(Signal)
SiteName = Literal["attention_head", "residual_stream"]
# Only older trainers made "weighted".
LogitScale = Literal["unit_norm", "standardized", "joint", "weighted"]
Digest = Annotated[Text, passing(DIGEST.fullmatch, "sha256: and 64 hex digits")]
LOCAL = "local"  # the revision of a folder or file, which has no commit


def _this_format(version: object) -> object:
    """Refuse another version of the format, which has other fields, whatever else is wrong:
    pydantic lets errors pass that are no ValueError."""
    if type(version) is not int or version != FORMAT_VERSION:
        raise BadValue(
            "a format that this release does not read",
            field="format_version",
            expected=FORMAT_VERSION,
            found=repr(version),
            cure="Train and publish it anew",
        )
    return version


def _is_time(text: str) -> bool:
    with suppress(ValueError):
        return datetime.strptime(text, TIME).strftime(TIME) == text
    return False


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
    arguments: Annotated[dict[str, TemplateArgument], PlainValidator(template_arguments)] | None = (
        None
    )

    def check(self) -> None:
        """Check that an empty record of arguments is left out."""
        self.require(self.arguments != {}, "arguments", "at least one argument, or no such field")


@dataclass(frozen=True)
class ReadoutRecord(Record):
    """Where a_l is taken (Eq. readout)."""

    site: SiteName
    position: Literal["last"]  # the answer onset t*


@dataclass(frozen=True)
class Classifier(Record):
    """risk = 1 - sigmoid(weight . signals + intercept)."""

    weight: tuple[Real, ...]  # one for each of the signals, in their order
    intercept: Real


@dataclass(frozen=True)
class TrainingRecord(Record):
    """The data and the settings of the training run."""

    data_digest: Filled
    rows: AtLeast2  # rows of the data file
    factual: Positive  # rows of class 1 that took part
    hallucinated: Positive  # rows of class 0 that took part
    left_out: Natural  # rows without a usable label
    groups: Positive  # questions or entities that folds keep together
    labels: TrainingLabels
    judge: Text | None  # the judge of generated answers
    seeds: Annotated[tuple[Int, ...], Field(min_length=1)]
    folds: AtLeast2
    c: AboveZero  # inverse strength of the probes' regularisation
    c_grid: tuple[AboveZero, ...]  # the candidates for c; empty if c was given
    class_balance: Filled
    hallutracer_version: Filled
    decoding: Decoding | None = None  # of the labelled answers; absent if unknown
    shapes: Names | None = None  # of the rows' conversations; absent if unknown
    scripts: Names | None = None  # of the rows' last questions; absent if unknown
    # Rows that ask a lone question in other words; absent if there were too few.
    reworded: Positive | None = None
    # With labels by the model itself: its sampled answers to each question, and their temperature;
    # absent with other labels.
    samples: Positive | None = None
    sample_temperature: AboveZero | None = None

    def check(self) -> None:
        """Check the counts."""
        used = self.factual + self.hallucinated
        self.require(used <= self.rows, "rows", f"at least factual + hallucinated = {used}")


@dataclass(frozen=True)
class FileRecord(Record):
    """One other file of the bundle."""

    bytes: Annotated[Natural, Field(le=MAX_FILE)]
    sha256: Annotated[Text, passing(HEX.fullmatch, "64 hex digits")]


def record_of(data: bytes) -> FileRecord:
    """Return the record of a file with these bytes."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """bundle.json.  Fields with a default are set on publishing, or null; a file must have every
    field."""

    format: Literal["hallutracer-bundle"] = FORMAT
    format_version: Annotated[Literal[1], BeforeValidator(_this_format)] = FORMAT_VERSION
    name: Name
    version: Positive = 1
    created: Annotated[Text, passing(_is_time, "UTC time like 2026-01-31T12:00:00Z")] = UNSET_TIME
    digest: Digest = ""  # digest of the content, see ``with_seal``
    seal: Digest = ""  # digest of this file
    model: ModelRecord
    tokenizer: TokenizerRecord
    chat_template: ChatTemplateRecord
    prompt_format: Literal["chat", "text"]  # how a bare prompt string is rendered
    dtype: DType  # of the training extraction
    readout: ReadoutRecord
    logit_scale: LogitScale
    signals: tuple[Signal, ...]  # depth_mean first
    classifier: Classifier
    # By cost, t = 1 / (1 + K), or by a target, on out-of-fold training risks; with a guarantee, the
    # guaranteed one.
    threshold: Share
    guarantee: Guarantee | None = None
    uncertainty: Uncertainty
    recalibration: Recalibration | None = None
    context: Context | None = None
    answer: AnswerProbe | None = None  # absent in the file if there is none
    guarantee_shapes: Names | None = None  # of the conversations in the calibration
    # The guarantee is for a policy with recheck, which also reads the answers' own tokens; absent
    # for other policies.
    guarantee_reads_answers: StrictBool | None = None
    # The guarantee for each kind of question that was tested separately; absent if none was.
    guarantee_strata: tuple[GuaranteeStratum, ...] | None = None
    training: TrainingRecord
    # relative name -> size and hash
    files: dict[Text, FileRecord] = dataclasses.field(default_factory=dict)

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"

    @property
    def total(self) -> int:
        """Bytes of all files that it lists."""
        return sum(record.bytes for record in self.files.values())

    @property
    def decoding(self) -> Decoding | None:
        """Return how the answers were decoded that the risk is about; None if that is not recorded.

        Answers that a training run generates have always been greedy, also before bundles recorded
        it."""
        recorded = self.training.decoding
        return GREEDY if recorded is None and self.training.labels != "given" else recorded

    @property
    def calibrated_decoding(self) -> Decoding:
        """Return how the answers of the guarantee's calibration were decoded; greedy if that is not
        recorded."""
        generated = self.guarantee is not None and self.guarantee.labels == "generate"
        return GREEDY if generated else self.decoding or GREEDY

    def stratum(self, passage: bool | None) -> GuaranteeStratum | None:
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

    def check(self) -> None:
        """Check what signals, guarantee, context probes and files require of each other."""
        signals = self.signals
        weights = len(self.classifier.weight)
        fine = signals[:1] == ("depth_mean",) and distinct(signals)
        self.require(fine, "signals", "depth_mean first and none twice")
        if weights != len(signals):
            raise errors.WrongShape(
                "another length",
                field="classifier.weight",
                expected=f"{len(signals)}, one for each signal",
                found=weights,
            )
        if self.guarantee is None:
            self.require(0.0 < self.threshold < 1.0, "threshold", "a number between 0 and 1")
            for field in ("guarantee_shapes", "guarantee_reads_answers", "guarantee_strata"):
                self.require(getattr(self, field) is None, field, "none without a guarantee")
        else:  # which may let nothing or everything through
            self._check_guarantee(self.guarantee)
        probes = () if self.context is None else self.context.probes
        field = "context" if self.context is None else "context.probes"
        for signal in signals:
            needed = CONTEXT_NEEDS.get(signal, set())
            fine = needed <= {probe.name for probe in probes}
            self.require(fine, field, f"the probes {sorted(needed)} of the signal {signal}")
        required = {*REQUIRED} if self.answer is None else {*REQUIRED, ANSWER}
        for file in sorted(required - self.files.keys()):
            raise MissingField(field=f"files.{file}")
        for file in self.files:
            if file not in required and not PLOT.fullmatch(file):
                raise UnknownField(field=f"files.{file}")

    def _check_guarantee(self, guarantee: Guarantee) -> None:
        fine = guarantee.threshold == self.threshold
        self.require(fine, "guarantee.threshold", f"the threshold, {self.threshold}")
        reads = self.guarantee_reads_answers
        fine = reads is None or (reads and self.answer is not None)
        self.require(fine, "guarantee_reads_answers", "true, and the record answer beside it")
        if (strata := self.guarantee_strata) is not None:
            fine = distinct([stratum.passage for stratum in strata])
            self.require(fine, "guarantee_strata", "with a passage, without one, or both")
            strictest = min(stratum.threshold for stratum in strata)
            fine = self.threshold == strictest
            self.require(fine, "threshold", f"the least of its strata, {strictest}")


# Fields of later releases, each of one record.  They are absent if they are None, so older bundles
# keep their bytes.
LATER = frozenset(
    (
        "adapter",
        "answer",
        "arguments",
        "decoding",
        "guarantee_reads_answers",
        "guarantee_strata",
        "reworded",
        "sample_temperature",
        "samples",
        "scripts",
        "shapes",
    )
)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the only bytes that bundle.json of this manifest may have."""
    return readable_json(as_document(manifest))


def as_document(manifest: Manifest) -> dict[str, Any]:
    """Return bundle.json's values."""
    return dataclasses.asdict(manifest, dict_factory=_stated)


def _stated(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None or name not in LATER}


def with_seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return bundle.json's values with their digest and seal.

    digest: over all values except version, created, digest and seal; by ``files`` it covers every
    byte of the other files.  seal: over all values except itself."""
    result = dict(document)
    for field, left_out in (
        ("digest", ("version", "created", "digest", "seal")),
        ("seal", ("seal",)),
    ):
        content = {key: value for key, value in result.items() if key not in left_out}
        result[field] = f"sha256:{hashlib.sha256(canonical_json(content)).hexdigest()}"
    return result


def sealed(manifest: Manifest, *, version: int = 1, created: str = UNSET_TIME) -> Manifest:
    """Return the same content under a version and a time, with digest and seal.  Raises what
    ``plain`` and ``read_record`` raise."""
    document = as_document(manifest) | {"version": version, "created": created}
    return read_record(with_seal(plain(document)))


def timestamp() -> str:
    """Return the present time as ``created`` has it."""
    return datetime.now(UTC).strftime(TIME)


def read_manifest(data: bytes) -> Manifest:
    """Read the bytes of bundle.json.

    Raises a subclass of BundleDamaged: Truncated, BadValue, NotFinite, UnknownField, MissingField
    or WrongShape for an invalid field, DigestMismatch if all fields are valid but one was changed
    after publishing."""
    with located(MANIFEST):
        document = parse_json(data)
        manifest = read_record(document)
        right = with_seal(document)
        whole = readable_json(document)
        for field in ("digest", "seal"):
            if (recorded := document[field]) != right[field]:
                raise DigestMismatch(
                    "the manifest was changed", field=field, expected=right[field], found=recorded
                )
        if data != whole:
            if whole.startswith(data):
                raise errors.Truncated(expected=f"{len(whole)} bytes", found=len(data))
            raise DigestMismatch("the manifest was reformatted", field="seal")
    return manifest


_ADAPTER = TypeAdapter(Manifest)
_KINDS: Final[Mapping[str, type[errors.BundleDamaged]]] = {
    "unexpected_keyword_argument": UnknownField,
    "missing": MissingField,
    "finite_number": errors.NotFinite,
}


def read_record(document: Any) -> Manifest:
    """Check every value of bundle.json.  Raises BadValue, NotFinite, UnknownField, MissingField and
    WrongShape."""
    try:
        manifest = _ADAPTER.validate_python(document)
    except ValidationError as error:
        raise _first(error) from error
    _check(manifest, document)
    return manifest


def _first(error: ValidationError) -> errors.BundleDamaged:
    """Return the first problem that pydantic found, but missing and unknown fields before bad
    values."""
    faults = error.errors()
    first = min(faults, key=lambda fault: [*_KINDS, fault["type"]].index(fault["type"]))
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    kind = _KINDS.get(first["type"], BadValue)
    field = path.removeprefix(".")
    if kind in (UnknownField, MissingField):
        return kind(field=field)
    return kind(
        field=field,
        expected=first["msg"].removeprefix("Input should be ").removeprefix("Value error, "),
        found=ascii(first["input"]),
    )


def _check(part: Any, document: Any, path: str = "") -> None:
    """Check a part of a manifest with valid types, the innermost records first: its fields are
    stated, even those with a default in code, and go together."""
    if isinstance(part, tuple):
        for number, (item, value) in enumerate(zip(part, document, strict=True)):
            _check(item, value, f"{path}[{number}]")
    if not isinstance(part, Record):
        return
    for name, value in vars(part).items():
        field = f"{path}.{name}".removeprefix(".")
        if name in document:
            _check(value, document[name], field)
            if name in LATER and value is None:
                raise BadValue(field=field, expected="a value, or no such field", found=None)
        elif name not in LATER:
            raise MissingField(field=field)
    try:
        part.check()
    except errors.BundleDamaged as error:
        error.field = f"{path}.{error.field}".removeprefix(".")
        raise
