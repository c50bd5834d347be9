"""The Python client of a HalluTracer service: ``Client`` and ``AsyncClient``.

Depends on httpx and pydantic only.  ``hallutracer_client.langchain``, ``.llamaindex`` and
``.haystack`` put the same guard into those frameworks; each needs the extra of its name."""

from hallutracer_client.client import AsyncClient, Client
from hallutracer_client.errors import (
    APIError,
    ClientError,
    DeadlineExceeded,
    NotFound,
    NotReady,
    Overloaded,
    RequestRefused,
    ServerError,
    TimedOut,
    TransportError,
    Unauthorized,
    UnexpectedAnswer,
)
from hallutracer_client.request import Generate, GenerateOptions, ScoreOptions
from hallutracer_client.results import (
    Bundle,
    BundleGuarantee,
    BundleList,
    BundleUncertainty,
    Completion,
    Guarantee,
    LoadedBundle,
    LoadedModel,
    ModelList,
    Readiness,
    Retrieval,
    Risk,
    ScoreResult,
    Usage,
    Withheld,
)
from hallutracer_client.stream import Answer, AsyncAnswer, AsyncStream, Stream
from hallutracer_client.version import VERSION as __version__

__all__ = [
    "APIError",
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "AsyncStream",
    "Bundle",
    "BundleGuarantee",
    "BundleList",
    "BundleUncertainty",
    "Client",
    "ClientError",
    "Completion",
    "DeadlineExceeded",
    "Generate",
    "GenerateOptions",
    "Guarantee",
    "LoadedBundle",
    "LoadedModel",
    "ModelList",
    "NotFound",
    "NotReady",
    "Overloaded",
    "Readiness",
    "RequestRefused",
    "Retrieval",
    "Risk",
    "ScoreOptions",
    "ScoreResult",
    "ServerError",
    "Stream",
    "TimedOut",
    "TransportError",
    "Unauthorized",
    "UnexpectedAnswer",
    "Usage",
    "Withheld",
    "__version__",
]
