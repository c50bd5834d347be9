"""The Python client of a HalluTracer service: ``Client`` and ``AsyncClient``.

Depends on httpx, httpx-sse and pydantic only.
"""

from service.client.asynchronous import AsyncAnswer, AsyncClient
from service.client.errors import (
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
from service.client.request import Generate, ScoreOptions
from service.client.results import (
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
from service.client.synchronous import Answer, Client

__all__ = [
    "APIError", "Answer", "AsyncAnswer", "AsyncClient", "Bundle", "BundleGuarantee", "BundleList", "BundleUncertainty",
    "Client", "ClientError", "Completion", "DeadlineExceeded", "Generate", "Guarantee", "LoadedBundle", "LoadedModel",
    "ModelList", "NotFound", "NotReady", "Overloaded", "Readiness",
    "Retrieval", "RequestRefused", "Risk", "ScoreOptions",
    "ScoreResult", "ServerError", "TimedOut", "TransportError", "Unauthorized", "UnexpectedAnswer", "Usage", "Withheld",
]  # fmt: skip
