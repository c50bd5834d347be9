"""Every family of the table, on a model built from the family's own config class."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from probes_store.manifest import SiteName
from service.engines.families import (
    FAMILIES,
    SITES,
    SiteModule,
    check_sites,
    family_of,
    geometry,
    locate,
)
from service.engines.transformers.engine import TransformersEngine
from service.errors import EngineError, UnknownFamily
from service.readout import Site
from tests.engines import tiny


def capture(model: Any, modules: list[Any], prompt: list[int]) -> list[torch.Tensor]:
    """Run one prompt and return the output of each module: [positions, width]."""
    captured: list[torch.Tensor] = []

    def capture_one(_module: Any, _given: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        captured.append(tensor[0].detach().clone())

    handles = [module.register_forward_hook(capture_one) for module in modules]
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), use_cache=False)
    for handle in handles:
        handle.remove()
    return captured


close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
UNKNOWN = "opt"  # a decoder without a row


def config_of(name: str) -> Any | None:
    """Return the configuration of a further family; None where this version of transformers does
    not have it yet."""
    try:
        return tiny.MORE[name]()
    except ValueError:
        return None


CONFIGS = {name: config_of(name) for name in tiny.MORE}
PINNED = Version("5.19.0")  # of transformers, in constraints.txt
ABSENT = "this version of transformers has no such family"
MORE = [
    pytest.param(name, marks=[pytest.mark.long, pytest.mark.skipif(config is None, reason=ABSENT)])
    for name, config in CONFIGS.items()
]


EVERY = [*tiny.ALL, *MORE, UNKNOWN]


def has_heads(name: str) -> bool:
    config = CONFIGS[name]
    return config is not None and bool(family_of(config).projection)


WITH_HEADS = [*tiny.ALL, *(family for family in MORE if has_heads(str(family.values[0])))]


def test_every_family_and_every_site_of_the_tables_is_tested() -> None:
    tested = {*tiny.ALL, *tiny.MORE}
    assert [family.name for family in FAMILIES if not tested & {*family.model_types}] == []
    assert tested - {name for family in FAMILIES for name in family.model_types} == {UNKNOWN}
    assert list(SITES) == list(Site)
    older = Version(transformers.__version__) < PINNED
    assert older or None not in CONFIGS.values()  # only an older version may lack one


@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_put_back_through_the_projection_give_the_attention_output(name: str):
    engine = tiny.shared_engine(name)
    model = tiny.modules(engine).model
    located, family = locate(model), family_of(model.config)
    prompt = tiny.prompts([11])[0]
    parent = family.projection.rpartition(".")[0]
    attention = capture(model, [block.get_submodule(parent) for block in located.blocks], prompt)
    site = Site.ATTENTION_HEAD
    [activations] = engine.extract([prompt], [site]).activations[site]
    heads = located.geometry.by_head(activations, site)  # [m, K, d]
    assert np.abs(activations).max() > 1e-3
    for layer, projection in enumerate(located.at[site]):
        weight: Any = projection.weight
        weight = (weight if name == "gpt2" else weight.T).detach().numpy()  # [K d, hidden]
        d = located.geometry.head_dim
        rebuilt = sum(
            heads[layer, k].astype(np.float64) @ weight[k * d : (k + 1) * d]
            for k in range(located.geometry.num_heads)
        )
        bias: Any = getattr(projection, "bias", None)
        if bias is not None:
            rebuilt = rebuilt + bias.detach().numpy()
        np.testing.assert_allclose(rebuilt, attention[layer][-1].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_the_residual_stream_equals_an_independent_capture(name: str):
    engine, site = tiny.shared_engine(name), Site.RESIDUAL_STREAM
    model = tiny.modules(engine).model
    prompt = tiny.prompts([13], seed=5)[0]
    [activations] = engine.extract([prompt], [site]).activations[site]
    blocks = capture(model, list(locate(model).blocks), prompt)
    with torch.no_grad():
        _, *hidden = model(
            input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False
        ).hidden_states
    for residual, block in zip(activations, blocks, strict=True):
        close(residual, block[-1].numpy())
    for residual, states in zip(activations[:-1], hidden, strict=False):
        close(residual, states[0, -1].numpy())  # the last one is after the final norm


def test_a_new_site_is_a_name_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    added: Any = StrEnum("Added", {"MLP": "mlp_output"})["MLP"]
    monkeypatch.setitem(SITES, added, SiteModule(lambda family: "mlp"))
    engine = tiny.engine("llama")
    model, prompt = tiny.modules(engine).model, tiny.prompts([11])[0]
    extracted = engine.extract([prompt], [added]).activations[added][0]
    outputs = capture(model, [block.get_submodule("mlp") for block in locate(model).blocks], prompt)
    close(extracted, [output[-1].numpy() for output in outputs])
    assert {site.value for site in Site} == set(get_args(SiteName))  # as a bundle names them


def test_geometry_counts_query_heads_and_takes_the_configs_head_dim_or_the_quotient() -> None:
    for make in tiny.CONFIGS.values():
        shape, options = geometry(make()), make.keywords.get("text_config", make.keywords)
        assert (shape.num_layers, shape.num_heads, shape.hidden_size) == (3, 4, 32)
        assert shape.head_dim == options.get("head_dim", 32 // 4)
    config = tiny.CONFIGS["mixtral"]()
    config.head_dim = None
    assert geometry(config).head_dim == 8
    config.hidden_size = 33
    with pytest.raises(EngineError, match="not a multiple"):
        geometry(config)


def test_a_family_without_a_row_is_read_at_the_residual_stream_alone() -> None:
    engine = tiny.shared_engine(UNKNOWN)
    prompts = tiny.prompts([7])
    words = (
        "'opt' is read at residual_stream only, not at attention_head: train with --readout"
        " residual_stream.*row in"
    )
    probes = [tiny.probes_of(engine)]
    reads: Any = ((engine.score, probes), (engine.begin, probes), (engine.extract, list(Site)))
    for read, what in reads:
        with pytest.raises(UnknownFamily, match=words):
            read(prompts, what)
    residual = tiny.probes_of(engine, Site.RESIDUAL_STREAM)
    assert np.isfinite(tiny.trajectories(engine, prompts, residual)).all()
    with pytest.raises(
        UnknownFamily, match="heads cannot be read: only some of its blocks have attention"
    ):
        check_sites("qwen3_next", [Site.ATTENTION_HEAD])
    check_sites("qwen3_next", [Site.RESIDUAL_STREAM])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda block, hidden, *more, **options: block(hidden, *more, **options)[..., None],
            "size 32|does not run as a decoder",
        ),
        (
            lambda block, hidden, *more, **options: block(
                hidden + hidden.sum(1, keepdim=True), *more, **options
            ),
            "from left to right|other hidden",
        ),
    ],
)
def test_what_is_no_chain_of_blocks_is_refused(change: Any, words: str) -> None:
    model = tiny.model(UNKNOWN)
    block = model.get_decoder().layers[-1]
    block.forward = partial(change, block.forward)
    with pytest.raises(EngineError, match=f"opt: .*({words})"):
        TransformersEngine(model, tiny.tokenizer())


def test_blocks_that_something_is_added_between_are_refused() -> None:
    model = tiny.model(UNKNOWN)
    model.get_decoder().layers[1].register_forward_pre_hook(
        lambda _, given: (2 * given[0], *given[1:])
    )
    with pytest.raises(EngineError, match="not given what the block before made"):
        TransformersEngine(model, tiny.tokenizer())


def test_a_decoder_without_its_blocks_or_with_two_lists_of_them_is_refused_by_name() -> None:
    model = tiny.model(UNKNOWN)
    decoder = model.get_decoder()
    decoder.others = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    with pytest.raises(EngineError, match=r"opt: OPT\w+ has 2 lists of 3 blocks.*layers.*others"):
        locate(model)
    decoder.layers[0].experts = decoder.others
    del decoder.others
    assert locate(model).blocks == tuple(decoder.layers)


def test_a_config_that_contradicts_the_modules_is_refused():
    model = tiny.model("llama")
    model.config.num_hidden_layers = 4
    with pytest.raises(EngineError, match="0 lists of 4 blocks"):
        locate(model)
    model.config.num_hidden_layers = 3
    model.config.head_dim = 8
    with pytest.raises(EngineError, match="takes 64 inputs"):
        locate(model)
