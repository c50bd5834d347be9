"""The readout in a forward pass of plain torch modules: equal to ``risk``, and of
which graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from service.engines.families import FAMILIES, family_of
from service.engines.vllm import attach
from service.engines.vllm.attach import SiteReadout
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Geometry, Probes, Site
from service.risk import truth_logits
from tests.engines import tiny

GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=8, hidden_size=20)
WIDTH = GEOMETRY.width(Site.ATTENTION_HEAD)
TOKENS, SLOTS = 12, 3
ONSETS = [5, 11, 2, 0]
CPU = torch.device("cpu")
LLAMA = next(family for family in FAMILIES if "llama" in family.model_types)


class AttentionLayer(nn.Module):
    """As vLLM's: the implementation writes its output."""

    def __init__(self, heads: int = GEOMETRY.num_heads) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.layer_name = heads, GEOMETRY.head_dim, "attention"
        self.impl = SimpleNamespace(
            forward=lambda values, output, **_: output.copy_(torch.tanh(values))
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(values)
        self.impl.forward(values, output=output, output_scale=None)
        return output


class Attention(nn.Module):
    """Its projection's input is the concatenated heads, unless ``change`` makes something else of
    attention's result."""

    def __init__(self) -> None:
        super().__init__()
        self.v_proj = nn.Linear(GEOMETRY.hidden_size, WIDTH, bias=False)
        self.attn = AttentionLayer()
        self.o_proj = nn.Linear(WIDTH, GEOMETRY.hidden_size, bias=False)
        self.o_proj.input_size = WIDTH  # an attribute of vLLM's row-parallel layers
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda attended: attended

    def forward(self, hidden_states: torch.Tensor) -> Any:
        output = self.o_proj(self.change(self.attn(self.v_proj(hidden_states))))
        return output.view_as(hidden_states)  # vLLM's go on with it, too


class Quantized(nn.Linear):
    """As in INT8 and NVFP4 checkpoints: a float32 parameter comes first, and nothing is stored in
    the compute dtype."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype != torch.bfloat16:
            raise RuntimeError(f"the kernel takes bfloat16, not {states.dtype}")
        return super().forward(states.float()).to(states)


class Block(nn.Module):
    """Returns hidden states and residual separately, as vLLM's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden if residual is None else hidden + residual
        return self.self_attn(residual), residual


class Decoder(nn.Module):
    """As vLLM's: takes embeddings in place of tokens.  ``reads`` makes one tensor of what the last
    block returns, for the norm, and ``between`` what the next is given of what a block returns."""

    def __init__(
        self, block: type[nn.Module], reads: Any, between: Any = lambda states: states
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(GEOMETRY.num_layers))
        self.reads, self.between = reads, between
        self.norm = nn.LayerNorm(GEOMETRY.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any,
        inputs_embeds: torch.Tensor,
    ) -> torch.Tensor:
        states: tuple[torch.Tensor, ...] = (inputs_embeds,)
        for layer in self.layers:
            returned = layer(positions, *[self.between(state) for state in states])
            states = returned if isinstance(returned, tuple) else (returned,)
        normed: torch.Tensor = self.norm(self.reads(*states))
        return normed


def added(hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return hidden + residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(Block, added)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(None, torch.arange(len(hidden)), None, hidden)
        return output


def installed(
    model: Model,
    sites: tuple[Site, ...] = tuple(Site),
    *,
    dtype: torch.dtype = torch.float32,
    room: int = 0,
    slots: int = SLOTS,
) -> dict[Site, SiteReadout]:
    plan = Plan(GEOMETRY, sites, slots, False, room > 0)
    return attach.install(model, LLAMA, plan, 0, 1, CPU, dtype, room)


def hidden(seed: int = 3, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(seed))


def run(
    model: Any, readouts: dict[Site, SiteReadout], inputs: torch.Tensor, onsets: list[int]
) -> torch.Tensor:
    """A step's forward pass."""
    for readout in readouts.values():
        readout.start(torch.tensor(onsets))
    with torch.inference_mode():
        return model(inputs)  # type: ignore[no-any-return]


def activations_of(inputs: torch.Tensor) -> dict[Site, np.ndarray]:
    """Activations [tokens, m, width] of an unchanged model, from hooks."""
    model, heads, stream = Model(), list[torch.Tensor](), list[torch.Tensor]()
    for block in model.model.layers:
        block.self_attn.o_proj.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
        block.register_forward_hook(lambda _, __, output: stream.append(sum(output)))
    with torch.inference_mode():
        model(inputs)
    both = zip(Site, (heads, stream), strict=True)
    return {site: torch.stack(rows, 1).numpy() for site, rows in both}


def probes(site: Site, seed: int) -> Probes:
    return tiny.probes(GEOMETRY, site, seed, scaled=True)


def check_read(
    read: np.ndarray, slot: int, rows: np.ndarray, probe: Probes, onsets: Sequence[int] = ONSETS
) -> None:
    """Truth logits [layers, onsets, slots] are those of a slot's probe."""
    readout = GEOMETRY.select(rows[onsets], probe.head, probe.site)
    expected = truth_logits(readout, probe.direction, probe.bias, probe.scale)
    np.testing.assert_allclose(read[:, :, slot].T, expected, atol=1e-5)


def test_half_types_are_read_in_float32_and_of_all_heads_only_the_slots_are_kept() -> None:
    """Every number in float32, of one rank and of several: tests/parity."""
    heads = installed(Model())[Site.ATTENTION_HEAD]
    states, probe = torch.randn(4, heads.width).to(torch.bfloat16), probes(Site.ATTENTION_HEAD, 1)
    heads.write(0, probe)
    heads.start(torch.arange(4))
    for _ in range(GEOMETRY.num_layers):
        heads.keep(states)
    whole = states.float().numpy()[:, None].repeat(GEOMETRY.num_layers, axis=1)
    check_read(heads.read().numpy(), 0, whole, probe, range(4))
    assert max(rows.shape[1] for rows in heads._kept) <= SLOTS


@pytest.mark.parametrize("sites", [(Site.ATTENTION_HEAD,), tuple(Site)])
def test_the_compilers_graph_has_one_operator_a_layer_at_the_residual_site_only(
    sites: tuple[Site, ...],
) -> None:
    """Alike in every layer: vLLM then compiles identical layers once.  That no compiled graph keeps
    old probes or rows: tests/parity."""
    nodes: list[str] = []

    def look(module: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        nodes.extend(f"{node.target} {node.args[2:]}" for node in module.graph.nodes)
        return module.forward

    model = Model()
    installed(model, sites)
    with torch.inference_mode():
        torch.compile(model, backend=look, dynamic=True)(hidden())
    ours = [node for node in nodes if "keep_residual" in node]
    assert (len(ours), len({*ours})) == ((3, 1) if Site.RESIDUAL_STREAM in sites else (0, 0))


def replay(
    model: Model, readouts: dict[Site, SiteReadout], tokens: int, inputs: torch.Tensor
) -> None:
    """What a CUDA graph does that was captured over so many tokens in a step that reads nothing:
    the same operations on the same addresses, whatever Python's side of a readout is now."""
    sides = {each: (each._count, each._calls, each._parts) for each in readouts.values()}
    for readout in sides:
        readout._count, readout._calls, readout._parts = 0, 0, []
    padded = hidden(tokens=tokens)
    padded[: len(inputs)] = inputs  # a step with fewer tokens is padded
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(attach, "captured", lambda states: True)
        model(padded)
    for readout, side in sides.items():
        readout._count, readout._calls, readout._parts = side


@pytest.mark.parametrize("slots", [SLOTS, GEOMETRY.num_heads])  # picked heads, and whole rows
def test_a_graph_that_was_captured_whole_keeps_each_steps_own_rows(slots: int) -> None:
    """At fixed addresses, for any number of rows up to that of its tokens, between steps that run
    without it."""
    model, most = Model(), 7
    readouts = installed(model, room=most, slots=slots)
    made = {site: probes(site, seed) for seed, site in enumerate(Site)}
    for site, readout in readouts.items():
        readout.write(1, made[site])
    run(model, readouts, hidden(), [0])  # the warm-up

    def addresses() -> list[int]:
        parts = ((readout._kept, readout._places) for readout in readouts.values())
        return [part.data_ptr() for part in chain(*parts) if part is not None]

    before = addresses()
    assert len(before) == 4
    for seed, (tokens, real, rows) in enumerate(
        [
            (8, 8, [5, 0, 7]),
            (8, 6, [1, 2, 3, 4, 5]),
            (1, 1, [0]),
            (0, 12, [11, 3]),
            (4, 4, [3]),
            (8, 8, []),
            (4, 3, [2, 1, 0]),
            (0, 9, []),
            (8, 7, [6, 5, 4, 3, 2, 1, 0]),
            (1, 1, [0]),
        ]
    ):
        inputs = hidden(seed, real)
        for readout in readouts.values():
            readout.start(torch.tensor(rows) if rows else None)
        if tokens:
            replay(model, readouts, tokens, inputs)
        else:
            with torch.inference_mode():
                model(inputs)
        expected_rows = activations_of(inputs)
        for site, readout in readouts.items():
            if rows:
                check_read(readout.read().numpy(), 1, expected_rows[site], made[site], rows)
            readout.start(None)
            assert not readout._places.any(), "a smaller graph would read outside its tokens"
    assert addresses() == before


def test_a_quantized_result_of_attention_is_not_read() -> None:
    model = Model()
    readout = installed(model, (Site.ATTENTION_HEAD,))[Site.ATTENTION_HEAD]
    readout.start(torch.tensor(ONSETS))
    values = torch.ones(TOKENS, readout.width)
    for block in model.model.layers:
        block.self_attn.attn.impl.forward(
            values, output=torch.empty_like(values), output_scale=torch.ones(1)
        )
    assert torch.isnan(readout.read()).all()


def test_a_module_tree_that_is_not_read_as_it_was_trained_on_is_refused() -> None:
    for layer, path, value, named in (
        (2, "o_proj.input_size", 30, "layer 2.* 30 inputs"),
        # A gate behind attention, and a projection that is given a part.
        (1, "change", lambda attended: 2 * attended, "layer 1's self_attn.o_proj does not read"),
        (1, "change", lambda attended: attended[..., :-1], "self_attn.o_proj does not read"),
        (1, "second", AttentionLayer(1), "layer 1 has 2 attention layers"),
        (0, "attn.use_direct_call", True, "layer 0"),
    ):
        model = Model()
        *parents, name = path.split(".")
        setattr(model.model.layers[layer].self_attn.get_submodule(".".join(parents)), name, value)
        with pytest.raises(EngineError, match=named):
            installed(model)
    shorter = Model()
    del shorter.model.layers[2]
    with pytest.raises(EngineError, match="in vLLM: Model has 0 lists of 3 blocks"):
        installed(shorter)


class One(nn.Module):
    """Returns one tensor."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class Two(nn.Module):
    """Returns hidden states and residual."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, hidden_states if residual is None else hidden_states + residual


@pytest.mark.parametrize(
    ("block", "reads", "between", "problem"),
    [
        (One, lambda hidden: hidden, (), ""),
        (Two, added, (), ""),
        (Two, lambda hidden, residual: hidden, (), ""),  # as vLLM's Cohere
        (
            Two,
            lambda hidden, residual: hidden + 2 * residual,
            (),
            "neither the sum nor the first is read",
        ),
        (
            One,
            lambda hidden: hidden,
            (lambda states: 2 * states,),
            "returns neither one tensor nor two that the next is given",
        ),
    ],
)
def test_the_stream_of_a_family_without_a_row_is_what_the_blocks_hand_on(
    block: type[nn.Module], reads: Any, between: tuple[Any, ...], problem: str
) -> None:
    model = nn.Module()
    model.model = Decoder(block, reads, *between)
    unknown = family_of(SimpleNamespace(model_type="new"))
    plan = Plan(GEOMETRY, (Site.RESIDUAL_STREAM,), SLOTS, False)
    install = partial(attach.install, model, unknown, plan, 0, 1, CPU, torch.float32)
    if problem:
        with pytest.raises(EngineError, match=f"new: a block of vLLM's Module .*{problem}"):
            install()
        return
    [readout] = install().values()
    readout.start(torch.tensor(ONSETS))
    stream = hidden()
    with torch.inference_mode():
        model.model(None, torch.arange(TOKENS), None, stream)
    for layer, rows in enumerate(readout.activations(), 1):
        expected = stream + layer if block is One else reads(stream, stream * layer)
        np.testing.assert_allclose(rows, expected[ONSETS], rtol=1e-5)


def test_quantized_blocks_are_checked_in_the_dtype_that_the_model_computes_in() -> None:
    def quantized() -> Model:
        model = Model()
        for block in model.model.layers:
            block.self_attn.v_proj = Quantized(GEOMETRY.hidden_size, WIDTH)
        assert next(model.model.layers[0].self_attn.v_proj.parameters()).dtype is torch.float32
        return model

    assert installed(quantized(), (Site.ATTENTION_HEAD,), dtype=torch.bfloat16)
    # Whatever a kernel raises is the reason of the refusal.
    with pytest.raises(
        EngineError, match="layer 0's .* cannot be checked: RuntimeError: the kernel takes bfloat16"
    ):
        installed(quantized(), (Site.ATTENTION_HEAD,), dtype=torch.float16)
