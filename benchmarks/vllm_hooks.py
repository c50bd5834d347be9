"""A vLLM worker that reads the way tools do that read activations through hooks: eager, a Python call in every layer.

Such tools (IBM's vLLM-Hook is one; this is not its code) register forward hooks after the model is loaded, keep each
request's last row in them, and copy the rows to the host after the step.  Under compilation such hooks never run.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from service.engines import families
from service.engines.vllm.attach import blocks_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


class Worker(VllmWorker):  # type: ignore[misc]
    """Keeps, of the last step, the input of each o_proj at each request's last token."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then hook each attention output projection."""
        super().load_model(*args, **kwargs)
        config = self.vllm_config.model_config.hf_config
        family = families.family_of(config)
        self.bench_rows: dict[int, torch.Tensor] = {}
        self.bench_kept = torch.empty(0)
        for layer, block in blocks_of(self.model_runner.model, family, config.num_hidden_layers).items():
            block.get_submodule(family.projection).register_forward_pre_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def keep(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            metadata = get_forward_context().attn_metadata
            if not isinstance(metadata, dict):
                return  # a warm-up
            starts = next(iter(metadata.values())).query_start_loc
            self.bench_rows[layer] = args[0][starts[1:].long() - 1].detach().clone()

        return keep

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """The step, then its rows to the host: [layers, requests, width]."""
        self.bench_rows.clear()
        output = super().execute_model(*args, **kwargs)
        if self.bench_rows:
            self.bench_kept = torch.stack(list(self.bench_rows.values())).cpu()
        return output

    def bench_shape(self) -> list[int]:
        """Of what was kept, to show that the hooks ran."""
        return list(self.bench_kept.shape)
