"""The manifest, bundle.json: what a bundle is, for which model, and the sha256 of each of its other files.

``Manifest`` is the one declaration of these fields in code; FORMAT.md documents them for other languages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, get_args

from probes_store.context import CONTEXT_SIGNALS, Context, check_context
from probes_store.errors import BadValue, DigestMismatch, MissingField, Truncated, UnknownField, WrongShape
from probes_store.guarantee import Guarantee, check_guarantee
from probes_store.recalibration import Recalibration, check_recalibration
from probes_store.strict import canonical_json, parse_json, read_record, readable_json
from probes_store.uncertainty import Uncertainty, check_uncertainty

FORMAT: Final = "hallutracer-bundle"
FORMAT_VERSION: Final = 1  # of a bundle with none of these
OPTIONAL: Final = {
    "guarantee": 2,
    "uncertainty": 3,
    "recalibration": 3,
    "context": 4,
    "guarantee_shapes": 4,
}  # field -> the format version that brought it
LATER_SCALES: Final = {"weighted": 3}  # logit scale -> the format version that brought it
UNSET_TIME = "1970-01-01T00:00:00Z"
MAX_FILE = 64 * 1024 * 1024  # bytes of any file: a file is read whole
MANIFEST = "bundle.json"
PROBES, GOLDEN, EVALUATION, CARD = "probes.safetensors", "golden.safetensors", "evaluation.json", "README.md"
REQUIRED = (PROBES, GOLDEN, EVALUATION, CARD)
NAME = re.compile(r"[a-z0-9](?!.*\.\.)[a-z0-9._-]{0,63}")  # of a bundle and of an alias
PLOT = re.compile(r"plots/[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.png")
_HEX = re.compile(r"[0-9a-f]{64}")
_NOT_CONTENT = ("version", "created", "digest", "seal")

Signal = Literal["depth_mean", "log_max_prob", "entropy", "passage", "stated", "stated_length"]
FIRST_TOKEN_SIGNALS: tuple[Signal, Signal] = ("log_max_prob", "entropy")
SIGNALS: tuple[Signal, ...] = get_args(Signal)
DType = Literal["float32", "bfloat16", "float16"]
SiteName = Literal["attention_head", "residual_stream"]
LogitScale = Literal["unit_norm", "standardized", "weighted"]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that the probes were trained on."""

    name: str  # as the trainer was given it; for people only, a folder may move
    revision: str  # hub commit, or "local"
    fingerprint: str  # over the configuration and the weight files
    architecture: str  # e.g. LlamaForCausalLM
    model_type: str  # e.g. llama
    num_layers: int
    num_heads: int  # query heads
    head_dim: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class TokenizerRecord:
    """The tokenizer."""

    digest: str  # over its own serialisation


@dataclass(frozen=True, slots=True)
class ChatTemplateRecord:
    """The chat template."""

    digest: str | None  # None where the tokenizer has none


@dataclass(frozen=True, slots=True)
class ReadoutRecord:
    """Where a_l is taken (Eq. readout)."""

    site: SiteName
    position: Literal["last"]  # the answer onset t*


@dataclass(frozen=True, slots=True)
class Classifier:
    """risk = 1 - sigmoid(weight . signals + intercept)."""

    weight: tuple[float, ...]  # one for each of the signals, in their order
    intercept: float


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the training run saw and chose."""

    data_digest: str
    rows: int  # rows of the data file
    factual: int  # rows of class 1 that took part
    hallucinated: int  # rows of class 0 that took part
    left_out: int  # rows without a usable label
    groups: int  # questions or entities that folds keep together
    labels: Literal["given", "generate"]
    judge: str | None  # who judged generated answers
    seeds: tuple[int, ...]
    folds: int
    c: float  # inverse strength of the probes' regularisation
    c_grid: tuple[float, ...]  # what it was chosen from; empty where it was given
    class_balance: str
    hallutracer_version: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One other file of the bundle."""

    bytes: int
    sha256: str  # 64 hex digits


def record_of(data: bytes) -> FileRecord:
    """The record of a file with these bytes."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """bundle.json.  Fields with a default are set on publishing; a file must have every field."""

    format: Literal["hallutracer-bundle"] = FORMAT
    format_version: Literal[1, 2, 3, 4] = FORMAT_VERSION  # ``version_of``; set on publishing
    name: str
    version: int = 1
    created: str = UNSET_TIME  # ISO 8601, UTC, whole seconds: 2026-01-31T12:00:00Z
    digest: str = ""  # of the content: sha256:..., see ``content_digest``
    seal: str = ""  # of this file: sha256:..., see ``manifest_seal``
    model: ModelRecord
    tokenizer: TokenizerRecord
    chat_template: ChatTemplateRecord
    prompt_format: Literal["chat", "text"]  # how a bare prompt string is rendered
    dtype: DType  # of the training extraction
    readout: ReadoutRecord
    logit_scale: LogitScale
    signals: tuple[Signal, ...]  # depth_mean first
    classifier: Classifier
    # By cost, t = 1 / (1 + K), or by a target, on out-of-fold training risks; with a guarantee, the one it is about.
    threshold: float
    guarantee: Guarantee | None = None  # these: ``OPTIONAL``
    uncertainty: Uncertainty | None = None
    recalibration: Recalibration | None = None
    context: Context | None = None
    guarantee_shapes: tuple[str, ...] | None = None  # of conversations, that the guarantee was calibrated on
    training: TrainingRecord
    files: dict[str, FileRecord] = dataclasses.field(default_factory=dict)  # relative name -> size and hash

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"

    @property
    def probe_dim(self) -> int:
        """d, the length of one probe direction."""
        return self.model.head_dim if self.readout.site == "attention_head" else self.model.hidden_size

    @property
    def probe_heads(self) -> int:
        """How many heads a probe could have been taken from: K, or 1 at the residual stream."""
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
        """Whether its reference has seen more than the trajectory; one that has not misses most of what is new."""
        return self.uncertainty is not None and self.context is not None

    @property
    def logits(self) -> int:
        """(1 + A) m: the truth logits of a prompt, then those of each context probe."""
        return self.model.num_layers * (1 + self.context_probes)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The only bytes that bundle.json of this manifest may have."""
    return readable_json(document_of(manifest))


def version_of(manifest: Manifest) -> int:
    """The format version that the manifest's content needs: the highest that brought a part of it."""
    there = [version for field, version in OPTIONAL.items() if getattr(manifest, field) is not None]
    return max([*there, LATER_SCALES.get(manifest.logit_scale, FORMAT_VERSION)])


def document_of(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON has it, without fields of later format versions: older files keep their bytes."""
    later = {field for field, version in OPTIONAL.items() if version > manifest.format_version}
    return {key: value for key, value in dataclasses.asdict(manifest).items() if key not in later}


def content_digest(manifest: Manifest) -> str:
    """sha256 over the canonical JSON of the manifest without version, created, digest and seal.

    ``files`` is inside, so it covers every byte of the other files; equal content has an equal digest whatever the
    time and the version.
    """
    return _sha256(manifest, _NOT_CONTENT)


def manifest_seal(manifest: Manifest) -> str:
    """sha256 over the canonical JSON of the manifest without the seal: covers version, created and digest as well."""
    return _sha256(manifest, ("seal",))


def _sha256(manifest: Manifest, left_out: tuple[str, ...]) -> str:
    document = {key: value for key, value in document_of(manifest).items() if key not in left_out}
    return f"sha256:{hashlib.sha256(canonical_json(document)).hexdigest()}"


def sealed(manifest: Manifest, *, version: int, created: str) -> Manifest:
    """The same content under a version and a time, with format version, digest and seal filled in."""
    manifest = dataclasses.replace(manifest, format_version=version_of(manifest))  # type: ignore[arg-type]
    dated = dataclasses.replace(manifest, version=version, created=created, digest=content_digest(manifest), seal="")
    return dataclasses.replace(dated, seal=manifest_seal(dated))


def read_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Bytes of bundle.json -> Manifest.  ``file`` is what messages call it.

    Raises a subclass of BundleDamaged: Truncated, BadValue, NotFinite, UnknownField, MissingField, WrongShape where a
    field is at fault, DigestMismatch where each field is fine but one was changed after publishing.
    """
    document = parse_json(data, file)
    _check_format(document, file)
    manifest = read_record(Manifest, _with_later_fields(document, file), file)
    check_fields(manifest, file)
    for field, expected in (("digest", content_digest(manifest)), ("seal", manifest_seal(manifest))):
        found = getattr(manifest, field)
        if found != expected:
            raise DigestMismatch("the manifest was changed", file=file, field=field, expected=expected, found=found)
    whole = manifest_bytes(manifest)
    if data != whole and whole.startswith(data):
        raise Truncated("the end is missing", file=file, expected=f"{len(whole)} bytes", found=f"{len(data)} bytes")
    if data != whole:
        raise DigestMismatch(
            "the manifest was reformatted",
            file=file,
            field="seal",
            expected="the bytes that publishing wrote",
            found="other white space or spelling",
        )
    return manifest


def _check_format(document: Any, file: str) -> None:
    """Check the version first: a newer format is reported as such and not by its first unknown field."""
    if isinstance(document, dict) and document.get("format") == FORMAT:
        found, newest = document.get("format_version"), max(OPTIONAL.values())
        if type(found) is int and found > newest:
            raise BadValue(
                "written by a newer version",
                file=file,
                field="format_version",
                expected=f"at most {newest}",
                found=found,
                cure="Upgrade hallutracer",
            )


def _with_later_fields(document: Any, file: str) -> Any:
    """``read_record`` wants every field: those of later versions are None, and may not be in the file."""
    if not isinstance(document, dict):
        return document
    found = document.get("format_version")
    own = found if type(found) is int else FORMAT_VERSION  # what is wrong with it, ``read_record`` says
    later = {field: None for field, version in OPTIONAL.items() if version > own}
    for field in later:
        if field in document:
            raise UnknownField(f"version {own} of this format has no such field", file=file, field=field)
    return document | later


def is_digest(text: str) -> bool:
    """Whether it is sha256: and 64 hex digits."""
    return text.startswith("sha256:") and bool(_HEX.fullmatch(text[7:]))


def check_fields(manifest: Manifest, file: str = MANIFEST) -> None:
    """Check ranges and the relations between fields; ``read_record`` has checked the types.

    Raises BadValue, WrongShape, MissingField and UnknownField.
    """

    def require(fine: bool, field: str, expected: object, found: object) -> None:
        if not fine:
            raise BadValue("bad value", file=file, field=field, expected=expected, found=repr(found))

    model, training = manifest.model, manifest.training
    require(bool(NAME.fullmatch(manifest.name)), "name", "[a-z0-9][a-z0-9._-]{0,63} without ..", manifest.name)
    require(manifest.version >= 1, "version", "1 or more", manifest.version)
    require(_is_time(manifest.created), "created", "UTC time like 2026-01-31T12:00:00Z", manifest.created)
    for field in ("digest", "seal"):
        text = getattr(manifest, field)
        require(is_digest(text), field, "sha256: and 64 hex digits", text)
    for field in ("name", "revision", "fingerprint", "architecture", "model_type"):
        require(getattr(model, field) != "", f"model.{field}", "a non-empty string", "")
    for field in ("num_layers", "num_heads", "head_dim", "hidden_size"):
        require(getattr(model, field) >= 1, f"model.{field}", "1 or more", getattr(model, field))
    require(manifest.tokenizer.digest != "", "tokenizer.digest", "a non-empty string", "")
    require(manifest.chat_template.digest != "", "chat_template.digest", "null or a non-empty string", "")
    signals = manifest.signals
    require(
        signals[:1] == ("depth_mean",) and len(set(signals)) == len(signals),
        "signals",
        "depth_mean first and none twice",
        signals,
    )
    if len(manifest.classifier.weight) != len(signals):
        raise WrongShape(
            "one weight for each signal",
            file=file,
            field="classifier.weight",
            expected=f"[{len(signals)}]",
            found=f"[{len(manifest.classifier.weight)}]",
        )
    version, guarantee = manifest.format_version, manifest.guarantee
    least = LATER_SCALES.get(manifest.logit_scale, FORMAT_VERSION)
    require(version >= least, "logit_scale", f"a value that version {version} has", manifest.logit_scale)
    own = " or ".join(field for field, brought in OPTIONAL.items() if brought == version)
    require(version == version_of(manifest), own, f"one, in version {version}", None)
    if guarantee is None:
        require(0.0 < manifest.threshold < 1.0, "threshold", "a number between 0 and 1", manifest.threshold)
    else:  # it may let nothing or everything through
        require(0.0 <= manifest.threshold <= 1.0, "threshold", "a number from 0 to 1", manifest.threshold)
        check_guarantee(guarantee, manifest.threshold, require)
    if manifest.uncertainty is not None:
        check_uncertainty(manifest.uncertainty, require)
    if manifest.recalibration is not None:
        check_recalibration(manifest.recalibration, require)
    read = [name for name in CONTEXT_SIGNALS if name in signals]
    require(manifest.context is not None or not read, "context", f"the probes of the signals {read}", None)
    if manifest.context is not None:
        check_context(manifest.context, signals, require)
    shapes = manifest.guarantee_shapes
    if shapes is not None:
        require(guarantee is not None, "guarantee_shapes", "null without a guarantee", shapes)
        named = bool(shapes) and all(shapes) and len(set(shapes)) == len(shapes)
        require(named, "guarantee_shapes", "one or more, each once, none empty", shapes)
    _check_training(training, require)
    _check_files(manifest, file, require)


def _check_training(training: TrainingRecord, require: Callable[[bool, str, object, object], None]) -> None:
    for field in ("data_digest", "class_balance", "hallutracer_version"):
        require(getattr(training, field) != "", f"training.{field}", "a non-empty string", "")
    minimum = {"rows": 2, "factual": 1, "hallucinated": 1, "left_out": 0, "groups": 1, "folds": 2}
    for field, least in minimum.items():
        require(getattr(training, field) >= least, f"training.{field}", f"{least} or more", getattr(training, field))
    used = training.factual + training.hallucinated
    require(used <= training.rows, "training.rows", f"at least factual + hallucinated = {used}", training.rows)
    require(len(training.seeds) >= 1, "training.seeds", "at least one seed", training.seeds)
    require(training.c > 0, "training.c", "a positive number", training.c)
    require(all(c > 0 for c in training.c_grid), "training.c_grid", "positive numbers", training.c_grid)


def _check_files(manifest: Manifest, file: str, require: Callable[[bool, str, object, object], None]) -> None:
    for name in REQUIRED:
        if name not in manifest.files:
            raise MissingField("every bundle has this file", file=file, field=f"files.{name}")
    for name, record in manifest.files.items():
        if name not in REQUIRED and not PLOT.fullmatch(name):
            raise UnknownField("this format has no such file", file=file, field=f"files.{name}")
        require(0 <= record.bytes <= MAX_FILE, f"files.{name}.bytes", f"0 to {MAX_FILE}", record.bytes)
        require(bool(_HEX.fullmatch(record.sha256)), f"files.{name}.sha256", "64 hex digits", record.sha256)


def _is_time(text: str) -> bool:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").strftime("%Y-%m-%dT%H:%M:%SZ") == text
    except ValueError:
        return False
