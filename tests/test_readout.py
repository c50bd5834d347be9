"""Rows, heads and shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.readout import Geometry, Site

GEOMETRIES = st.builds(
    Geometry,
    num_layers=st.integers(1, 5),
    num_heads=st.integers(1, 6),
    head_dim=st.integers(1, 7),
    hidden_size=st.integers(1, 20),
)


def test_widths_do_not_assume_that_heads_make_the_hidden_size():
    shape = Geometry(num_layers=3, num_heads=4, head_dim=16, hidden_size=32)
    assert [shape.width(site) for site in Site] == [64, 32]
    assert [shape.heads(site) for site in Site] == [4, 1]
    assert [shape.dim(site) for site in Site] == [16, 32]


@given(GEOMETRIES, st.sampled_from(Site))
def test_heads_times_dim_is_the_width(shape: Geometry, site: Site):
    assert shape.heads(site) * shape.dim(site) == shape.width(site)


@given(GEOMETRIES, st.sampled_from(Site), st.lists(st.integers(1, 3), max_size=2))
def test_head_k_is_its_slice_of_the_row(shape: Geometry, site: Site, leading: list[int]):
    size = (*leading, shape.num_layers, shape.width(site))
    rows = np.arange(np.prod(size), dtype=np.float32).reshape(size)
    heads = shape.by_head(rows, site)
    assert heads.shape == (*size[:-1], shape.heads(site), shape.dim(site))
    assert heads.base is not None  # a view, no copy
    for k in range(shape.heads(site)):
        np.testing.assert_array_equal(heads[..., k, :], rows[..., k * shape.dim(site) : (k + 1) * shape.dim(site)])


@given(GEOMETRIES, st.sampled_from(Site), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 1000))
def test_select_takes_each_layers_own_head(shape: Geometry, site: Site, leading: list[int], seed: int):
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(*leading, shape.num_layers, shape.width(site)))
    head = generator.integers(0, shape.heads(site), shape.num_layers)
    selected = shape.select(rows, head, site)
    assert selected.shape == (*leading, shape.num_layers, shape.dim(site))
    d = shape.dim(site)
    for layer, k in enumerate(head):
        np.testing.assert_array_equal(selected[..., layer, :], rows[..., layer, k * d : (k + 1) * d])


def test_a_head_that_does_not_exist_is_an_error():
    shape = Geometry(num_layers=2, num_heads=2, head_dim=3, hidden_size=6)
    with pytest.raises(IndexError):
        shape.select(np.zeros((2, 6)), np.array([0, 2]), Site.ATTENTION_HEAD)
