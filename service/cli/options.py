"""Options that several commands share: one declaration, one help text, one environment variable each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
