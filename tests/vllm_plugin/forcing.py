"""A logits processor for vLLM: a request's ``vllm_xargs.says`` has the tokens that its answer is
made of."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Forcing(AdapterLogitsProcessor):  # type: ignore[misc]
    """Unlike a grammar, it leaves the request as any other: an end token could end it at once."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        says = (params.extra_args or {}).get("says")

        def force(decoded: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[says[len(decoded)]] = 1e4
            return logits

        return None if says is None else force
