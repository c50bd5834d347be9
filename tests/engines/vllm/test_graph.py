"""The readout in a forward pass of plain torch modules: equal to ``risk``, split over ranks, not recompiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from service.engines.families import FAMILIES
from service.engines.vllm import graph
from service.engines.vllm.graph import SiteTensors, Sizes, TensorParallelRank
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Geometry, Probes, Site
from service.risk import depth_mean, truth_logits
from tests.engines import tiny

GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=8, hidden_size=20)
TOKENS, SLOTS = 12, 3
SIZES = Sizes(tokens=16, prompts=4)
CPU = torch.device("cpu")
ALONE = TensorParallelRank(0, 1)
LLAMA = next(family for family in FAMILIES if "llama" in family.model_types)


class Attention(nn.Module):
    """Its projection's input is the concatenated heads; ``share`` of them on this rank."""

    def __init__(self, share: range) -> None:
        super().__init__()
        d = GEOMETRY.head_dim
        self.heads = slice(share.start * d, share.stop * d)
        self.v_proj = nn.Linear(GEOMETRY.hidden_size, GEOMETRY.num_heads * d, bias=False)
        self.o_proj = nn.Linear(GEOMETRY.num_heads * d, GEOMETRY.hidden_size, bias=False)
        whole = self.o_proj
        self.o_proj = nn.Linear(len(share) * d, GEOMETRY.hidden_size, bias=False)
        self.o_proj.weight = nn.Parameter(whole.weight[:, self.heads].clone())
        self.o_proj.input_size = len(share) * d  # an attribute of vLLM's row-parallel layers


class Block(nn.Module):
    """Returns hidden states and residual separately, as vLLM's blocks do."""

    def __init__(self, share: range) -> None:
        super().__init__()
        self.self_attn = Attention(share)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden if residual is None else hidden + residual
        attention = self.self_attn
        return attention.o_proj(torch.tanh(attention.v_proj(residual))[..., attention.heads]), residual


class Model(nn.Module):
    def __init__(self, share: range = range(4), layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Block(share) for _ in range(layers)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for block in self.model.layers:
            hidden, residual = block(hidden, residual)
        return hidden + residual


def installed(
    model: Model, sites: tuple[Site, ...] = tuple(Site), *, activations: bool = False, rank: TensorParallelRank = ALONE
) -> tuple[dict[Site, SiteTensors], torch.Tensor]:
    return graph.install(model, LLAMA, Plan(GEOMETRY, sites, SLOTS, activations), rank, SIZES, CPU)


def hidden(seed: int = 3, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(seed))


def activations_of(model: Model, inputs: torch.Tensor) -> dict[Site, np.ndarray]:
    """Activations [tokens, m, width] of an unchanged model, from hooks."""
    captured: dict[Site, list[torch.Tensor]] = {site: [] for site in Site}
    handles = []
    for block in model.model.layers:
        handles.append(
            block.self_attn.o_proj.register_forward_pre_hook(
                lambda _module, given: captured[Site.ATTENTION_HEAD].append(given[0])
            )
        )
        handles.append(
            block.register_forward_hook(
                lambda _module, _given, output: captured[Site.RESIDUAL_STREAM].append(output[0] + output[1])
            )
        )
    with torch.inference_mode():
        model(inputs)
    for handle in handles:
        handle.remove()
    return {site: torch.stack(rows, 1).numpy() for site, rows in captured.items()}


def expected(rows: np.ndarray, probes: Probes) -> np.ndarray:
    readout = GEOMETRY.select(rows, probes.head, probes.site)
    return truth_logits(readout, probes.direction, probes.bias, probes.scale)


def read_out(held: SiteTensors, layer: int, states: torch.Tensor) -> None:
    buffers = held.index[layer], held.direction[layer], held.offset[layer], held.logits, held.mean
    graph.write_truth_logits(states, *buffers, layer, 1 / GEOMETRY.num_layers)


def probes(site: Site, seed: int) -> Probes:
    return tiny.probes(GEOMETRY, site, seed, scaled=True)


def test_every_slot_of_both_sites_is_the_methods_truth_logit_of_every_token() -> None:
    rows = activations_of(Model(), hidden())
    model = Model()
    tensors, _ = installed(model)
    made = {(site, slot): probes(site, 10 * slot + number) for number, site in enumerate(Site) for slot in range(SLOTS)}
    for (site, slot), probe in made.items():
        tensors[site].write(slot, probe)
    with torch.inference_mode():
        model(hidden())
    for (site, slot), probe in made.items():
        wanted = expected(rows[site], probe)
        gathered = tensors[site].gather(torch.arange(TOKENS))[:, :, slot].numpy()
        np.testing.assert_allclose(gathered[:-1].T, wanted, atol=1e-5)
        np.testing.assert_allclose(gathered[-1], depth_mean(wanted), atol=1e-5)
        assert torch.isnan(tensors[site].logits[:, TOKENS:, slot]).all(), "rows beyond the step are not written"


def test_reading_changes_neither_the_model_nor_its_parameters() -> None:
    plain, model = Model(), Model()
    names = set(plain.state_dict())
    installed(model, activations=True)
    assert set(model.state_dict()) == names
    with torch.inference_mode():
        assert torch.equal(model(hidden()), plain(hidden()))


def test_an_unused_slot_reads_zero() -> None:
    model = Model()
    tensors, _ = installed(model)
    tensors[Site.ATTENTION_HEAD].write(1, probes(Site.ATTENTION_HEAD, 1))
    with torch.inference_mode():
        model(hidden())
    assert (tensors[Site.ATTENTION_HEAD].logits[:, :TOKENS, [0, 2]] == 0).all()
    assert (tensors[Site.ATTENTION_HEAD].logits[:, :TOKENS, 1] != 0).any()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_split_the_heads_add_up(size: int) -> None:
    """Each rank has its own heads at the attention site, and everything at the residual stream."""
    rows = activations_of(Model(), hidden())
    slots = {site: [probes(site, seed) for seed in range(SLOTS)] for site in Site}
    gathered: dict[Site, list[np.ndarray]] = {site: [] for site in Site}
    share = GEOMETRY.num_heads // size
    for rank in range(size):
        model = Model(range(rank * share, (rank + 1) * share))
        tensors, _ = installed(model, activations=True, rank=TensorParallelRank(rank, size))
        assert tensors[Site.ATTENTION_HEAD].heads == (rank * share, share)
        assert tensors[Site.ATTENTION_HEAD].split
        assert not tensors[Site.RESIDUAL_STREAM].split
        for site in Site:
            for slot, probe in enumerate(slots[site]):
                tensors[site].write(slot, probe)
        d = GEOMETRY.head_dim
        inputs = {
            Site.ATTENTION_HEAD: torch.from_numpy(rows[Site.ATTENTION_HEAD][..., rank * share * d :][..., : share * d]),
            Site.RESIDUAL_STREAM: torch.from_numpy(rows[Site.RESIDUAL_STREAM]),
        }
        for site in Site:
            for layer in range(GEOMETRY.num_layers):
                read_out(tensors[site], layer, inputs[site][:, layer])
            gathered[site].append(tensors[site].gather(torch.arange(TOKENS)).numpy())
    for site in Site:
        together = np.sum(gathered[site], axis=0)
        for slot, probe in enumerate(slots[site]):
            wanted = expected(rows[site], probe)
            np.testing.assert_allclose(together[:-1, :, slot].T, wanted, atol=1e-5)
            np.testing.assert_allclose(together[-1, :, slot], depth_mean(wanted), atol=1e-5)


def test_half_types_are_read_in_float32() -> None:
    states = torch.randn(4, 32).to(torch.bfloat16)
    held = SiteTensors(
        Plan(GEOMETRY, (Site.ATTENTION_HEAD,), 1, False),
        Site.ATTENTION_HEAD,
        range(3),
        (0, 4),
        TensorParallelRank(0, 1),
        SIZES,
        CPU,
    )
    probe = probes(Site.ATTENTION_HEAD, 5)
    held.write(0, probe)
    for layer in range(3):
        read_out(held, layer, states)
    rows = states.float().numpy()[:, None].repeat(3, axis=1)
    np.testing.assert_allclose(held.logits[:, :4, 0].T.numpy(), expected(rows, probe), atol=1e-5)


def test_another_probe_and_another_step_need_no_other_graph() -> None:
    """A change of bundles needs no compilation, and a compiled graph keeps no old probes."""
    compilations = 0

    def count(module: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        nonlocal compilations
        compilations += 1
        return module.forward

    rows = activations_of(Model(), hidden())
    model = Model()
    tensors, _ = installed(model)
    compiled = torch.compile(model, backend=count, dynamic=True)
    for seed in range(4):
        made = {site: probes(site, seed) for site in Site}
        with torch.inference_mode():
            for site, probe in made.items():
                tensors[site].clear(TOKENS)
                tensors[site].write(1, probe)
            compiled(hidden())
        for site, probe in made.items():
            actual = tensors[site].logits[:, :TOKENS, 1].T.numpy()
            np.testing.assert_allclose(actual, expected(rows[site], probe), atol=1e-5)
        if seed == 0:
            once = compilations
    assert once > 0
    assert compilations == once


def test_activations_are_kept_at_the_onsets() -> None:
    rows = activations_of(Model(), hidden())
    model = Model()
    tensors, onsets = installed(model, activations=True)
    onsets.copy_(torch.tensor([5, 11, 2, 0]))
    with torch.inference_mode():
        model(hidden())
    for site in Site:
        kept = tensors[site].activations
        assert kept is not None
        np.testing.assert_array_equal(kept.numpy().swapaxes(0, 1), rows[site][[5, 11, 2, 0]])


def test_a_rank_has_the_blocks_of_its_stage() -> None:
    class PPMissingLayer(nn.Identity):
        pass

    model = Model()
    model.model.layers[0] = PPMissingLayer()
    blocks = graph.blocks_of(model, LLAMA, 3)
    assert list(blocks) == [1, 2]
    tensors, _ = installed(model)
    assert tensors[Site.ATTENTION_HEAD].layers == range(1, 3)
    assert tensors[Site.ATTENTION_HEAD].logits.shape[0] == 2


def test_an_unknown_module_tree_is_refused() -> None:
    with pytest.raises(EngineError, match="2 blocks"):
        installed(Model(layers=2))
    with pytest.raises(EngineError, match="--engine transformers"):
        graph.blocks_of(nn.Linear(2, 2), LLAMA, 3)
    model = Model()
    model.model.layers[2].self_attn.o_proj.input_size = 30
    with pytest.raises(EngineError, match="layer 2.* 30 inputs"):
        installed(model)


def test_writing_a_probe_leaves_other_slots_unchanged() -> None:
    model = Model()
    tensors, _ = installed(model)
    held = tensors[Site.ATTENTION_HEAD]
    for slot in range(SLOTS):
        held.write(slot, probes(Site.ATTENTION_HEAD, slot))
    before = [tensor.clone() for tensor in (*held.index, *held.direction, *held.offset)]
    held.write(1, probes(Site.ATTENTION_HEAD, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, (*held.index, *held.direction, *held.offset), strict=True))
    held.write(1, probes(Site.ATTENTION_HEAD, 99))
    for old, new in zip(before, (*held.index, *held.direction, *held.offset), strict=True):
        assert torch.equal(old[[0, 2]], new[[0, 2]])
