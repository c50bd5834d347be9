"""Quantized checkpoints made from a model on disk, each beside the plain model that its weights
stand for.

Only the blocks' linear layers are quantized, in the tensors and names of each published format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensor = torch.Tensor
Made = tuple[
    dict[str, Tensor], Tensor
]  # tensors by their suffix, and the weight [outputs, inputs] that they stand for
GROUP = 32  # inputs with one scale, of the 4-bit formats
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _scaled(weight: Tensor, most: float, group: int | None) -> tuple[Tensor, Tensor]:
    """``weight`` in units of its scale, and the scales [outputs, groups], which bfloat16 holds
    exactly."""
    width = group or weight.shape[1]
    parts = weight.view(len(weight), -1, width)
    scale = (parts.abs().amax(-1) / most).bfloat16().float()
    return (parts / scale[..., None]).reshape(weight.shape), scale


def _packed(values: Tensor) -> Tensor:
    """Eight 4-bit numbers of the last axis in one int32, the first in its lowest bits."""
    shifts = 4 * torch.arange(8)
    words = (values.long().view(*values.shape[:-1], -1, 8) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _int8(weight: Tensor) -> Made:
    # Seven of the eight bits: without VNNI a CPU's sums of two products saturate at 16 bits.
    units, scale = _scaled(weight, 63, None)
    whole = units.round().clamp(-64, 63)
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


def _fp8(weight: Tensor, *, per_tensor: bool = False) -> Made:
    units, scale = _scaled(weight, 448, None)
    if per_tensor:
        scale = scale.max()
        units = weight / scale
    rounded = units.clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    units, scale = _scaled(weight, 7, GROUP)
    whole = units.round().clamp(-8, 7)
    return (whole + 8).int(), scale, whole * scale.repeat_interleave(GROUP, 1)


def _packed_int4(weight: Tensor) -> Made:
    whole, scale, meant = _four_bits(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _packed(whole), "weight_scale": scale, "weight_shape": shape}, meant


def _gptq(weight: Tensor) -> Made:
    whole, scale, meant = _four_bits(weight)
    outputs, inputs = weight.shape
    zeros = torch.full(
        (inputs // GROUP, outputs), 7, dtype=torch.int32
    )  # 8, less the one that the format adds
    return {
        "qweight": _packed(whole).T.contiguous(),
        "qzeros": _packed(zeros),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }, meant


def _awq(weight: Tensor) -> Made:
    whole, scale, meant = _four_bits(weight)
    outputs, inputs = weight.shape

    def shuffled(values: Tensor) -> Tensor:
        return _packed(values.view(len(values), -1, 8)[..., AWQ_ORDER].reshape(values.shape))

    zeros = torch.full((inputs // GROUP, outputs), 8, dtype=torch.int32)
    packed = {
        "qweight": shuffled(whole.T.contiguous()),
        "qzeros": shuffled(zeros),
        "scales": scale.T.contiguous(),
    }
    return packed, meant


def _compressed(layout: str, bits: int, kind: str, activations: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    inputs = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if activations else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FOUR = {"bits": 4, "group_size": GROUP}
# Name -> how one weight is quantized, and the configuration's ``quantization_config``.
METHODS: Mapping[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "int8": (_int8, _compressed("int-quantized", 8, "int", True)),
    "fp8-channel": (_fp8, _compressed("float-quantized", 8, "float", True)),
    "int4": (_packed_int4, _compressed("pack-quantized", 4, "int", False)),
    "fp8": (
        lambda weight: _fp8(weight, per_tensor=True),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "gptq": (_gptq, FOUR | {"quant_method": "gptq", "desc_act": False, "sym": True}),
    "awq": (_awq, FOUR | {"quant_method": "awq", "zero_point": True, "version": "gemm"}),
}
# The largest difference, relative to the largest number, and the dtype that vLLM computes in.
BOUNDS = {"int8": (0.02, "float32")} | {
    method: (0.12, "bfloat16") for method in METHODS if method != "int8"
}
# Kernels of vLLM's CPU build that a CPU without AVX-512 lacks: it then refuses to start, and names
# them.
KERNELS = {
    "int4": "cpu_gemm_wna16",
    "gptq": "cpu_gemm_wna16",
    "awq": "cpu_gemm_wna16",
    "fp8": "static_scaled_fp8_quant",
}


def round_inputs(model: torch.nn.Module, method: str) -> None:
    """Have the blocks' linear layers of a plain model round each token's inputs as the method
    does."""
    most = {"int8": 127.0, "fp8-channel": 448.0}.get(method)
    if most is None:
        return

    def rounded(states: Tensor) -> Tensor:
        scale = (states.abs().amax(-1, keepdim=True) / most).clamp(min=1e-9)  # padding is all zeros
        units = states / scale
        return (
            units.round() if method == "int8" else units.to(torch.float8_e4m3fn).to(units)
        ) * scale

    for name, module in model.named_modules():
        if ".layers." in name and name.endswith("proj"):  # behind the hooks that read its inputs
            module.forward = lambda states, forward=module.forward: forward(rounded(states))


def quantize(plain: Path, method: str, folder: Path) -> tuple[Path, Path]:
    """A quantized copy of a plain model, and the plain model that its weights stand for."""
    make, settings = METHODS[method]
    weights = load_file(plain / "model.safetensors")
    packed = dict[str, Tensor]()
    meant = dict[str, Tensor]()
    for name, weight in weights.items():
        packed[name] = meant[name] = weight
        if ".layers." in name and name.endswith("proj.weight"):
            tensors, meant[name] = make(weight.float())
            packed.pop(name)
            packed |= {
                f"{name.removesuffix('weight')}{suffix}": tensor
                for suffix, tensor in tensors.items()
            }
    folders = folder / f"{method}-packed", folder / f"{method}-meant"
    config = json.loads((plain / "config.json").read_text())
    for target, tensors, more in zip(
        folders, (packed, meant), ({"quantization_config": settings}, {}), strict=True
    ):
        target.mkdir(parents=True)
        for file in plain.iterdir():
            if file.suffix == ".json":
                (target / file.name).write_bytes(file.read_bytes())
        (target / "config.json").write_text(json.dumps(config | more))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, target / "model.safetensors", {"format": "pt"})
    return folders
