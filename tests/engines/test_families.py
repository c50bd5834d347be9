"""Every family of the table, on a model built from the family's own config class."""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from probes_store.manifest import SiteName
from service.engines.families import FAMILIES, SITES, SiteModule, family_of, geometry, locate
from service.errors import EngineError, UnknownFamily
from service.readout import Site
from tests.engines import tiny


def capture(model: Any, modules: list[Any], prompt: list[int], *, inputs: bool = False) -> list[torch.Tensor]:
    """Run one prompt and return the input or output of each module: [positions, width]."""
    captured: list[torch.Tensor] = []

    def capture_one(_module: Any, given: Any, output: Any) -> None:
        tensor = given[0] if inputs else output[0] if isinstance(output, tuple) else output
        captured.append(tensor[0].detach().clone())

    handles = [module.register_forward_hook(capture_one) for module in modules]
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), use_cache=False)
    for handle in handles:
        handle.remove()
    return captured


def test_every_model_type_and_every_site_of_the_tables_is_tested() -> None:
    assert sorted(name for family in FAMILIES for name in family.model_types) == tiny.ALL
    assert list(SITES) == list(Site)


@pytest.mark.parametrize("name", tiny.ALL)
def test_heads_put_back_through_the_projection_give_the_attention_output(name: str):
    engine = tiny.shared_engine(name)
    model = tiny.modules(engine).model
    located, family = locate(model), family_of(model.config)
    prompt = tiny.prompts([11])[0]
    parent = family.projection.rpartition(".")[0]
    attention = capture(model, [block.get_submodule(parent) for block in located.blocks], prompt)
    activations = engine.extract([prompt], [Site.ATTENTION_HEAD]).activations[Site.ATTENTION_HEAD][0]
    heads = located.geometry.by_head(activations, Site.ATTENTION_HEAD)  # [m, K, d]
    assert np.abs(activations).max() > 1e-3
    for layer, projection in enumerate(located.at[Site.ATTENTION_HEAD]):
        weight: Any = projection.weight
        weight = (weight if name == "gpt2" else weight.T).detach().numpy()  # [K d, hidden]
        d = located.geometry.head_dim
        rebuilt = sum(
            heads[layer, k].astype(np.float64) @ weight[k * d : (k + 1) * d] for k in range(located.geometry.num_heads)
        )
        bias: Any = getattr(projection, "bias", None)
        if bias is not None:
            rebuilt = rebuilt + bias.detach().numpy()
        np.testing.assert_allclose(rebuilt, attention[layer][-1].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", tiny.ALL)
def test_activations_equal_an_independent_capture(name: str):
    engine = tiny.shared_engine(name)
    model = tiny.modules(engine).model
    located = locate(model)
    prompt = tiny.prompts([13], seed=5)[0]
    activations = engine.extract([prompt], list(Site)).activations
    blocks = capture(model, list(located.blocks), prompt)
    projected = capture(model, list(located.at[Site.ATTENTION_HEAD]), prompt, inputs=True)
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
    for layer in range(located.geometry.num_layers):
        residual = activations[Site.RESIDUAL_STREAM][0, layer]
        np.testing.assert_allclose(residual, blocks[layer][-1].numpy(), rtol=1e-5, atol=1e-6)
        if layer < located.geometry.num_layers - 1:  # transformers' last hidden state is after the final norm
            np.testing.assert_allclose(residual, hidden[layer + 1][0, -1].numpy(), rtol=1e-5, atol=1e-6)
        head = activations[Site.ATTENTION_HEAD][0, layer]
        np.testing.assert_allclose(head, projected[layer][-1].numpy(), rtol=1e-5, atol=1e-6)


def test_a_new_site_is_a_name_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    added: Any = StrEnum("Added", {"MLP": "mlp_output"})["MLP"]
    monkeypatch.setitem(SITES, added, SiteModule(lambda family: "mlp"))
    engine = tiny.engine("llama")
    model, prompt = tiny.modules(engine).model, tiny.prompts([11])[0]
    found = engine.extract([prompt], [added]).activations[added][0]
    outputs = capture(model, [block.get_submodule("mlp") for block in locate(model).blocks], prompt)
    np.testing.assert_allclose(found, [output[-1].numpy() for output in outputs], rtol=1e-5, atol=1e-6)
    assert {site.value for site in Site} == set(get_args(SiteName))  # as a bundle names them


def test_geometry_counts_query_heads_and_takes_the_configs_head_dim_or_the_quotient() -> None:
    wide = {"llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gemma3", "mixtral", "qwen3_moe"}
    for name in tiny.ALL:
        shape = geometry(tiny.CONFIGS[name]())
        assert (shape.num_layers, shape.num_heads, shape.hidden_size) == (3, 4, 32)
        assert shape.head_dim == (16 if name in wide else 8)
    config = tiny.CONFIGS["mixtral"]()
    config.head_dim = None
    assert geometry(config).head_dim == 8
    config.hidden_size = 33
    with pytest.raises(EngineError, match="not a multiple"):
        geometry(config)


def test_an_unknown_family_names_the_known_ones_and_the_place_to_add_it():
    with pytest.raises(UnknownFamily, match=r"mamba.*qwen3_moe.*service/engines/families\.py"):
        family_of(SimpleNamespace(model_type="mamba"))


def test_a_config_that_contradicts_the_modules_is_refused():
    model = tiny.model("llama")
    model.config.num_hidden_layers = 4
    with pytest.raises(EngineError, match="3 blocks where .* 4"):
        locate(model)
    model.config.num_hidden_layers = 3
    model.config.head_dim = 8
    with pytest.raises(EngineError, match="takes 64 inputs"):
        locate(model)
