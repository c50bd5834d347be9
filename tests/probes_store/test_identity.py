from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from probes_store.bundle import render
from probes_store.errors import (
    BundleRefused,
    WrongChatTemplate,
    WrongGeometry,
    WrongModel,
    WrongRevision,
    WrongTokenizer,
)
from probes_store.identity import check_identity
from service.engines.base import ModelIdentity
from service.readout import Geometry
from tests.probes_store.factory import MODEL, make_draft

MANIFEST = render(make_draft())[0]
LOADED = ModelIdentity(
    model="/another/folder",
    revision="local",
    fingerprint=MODEL.fingerprint,
    architecture=MODEL.architecture,
    model_type=MODEL.model_type,
    tokenizer=MANIFEST.tokenizer.digest,
    chat_template=MANIFEST.chat_template.digest,
    dtype="bfloat16",
    geometry=Geometry(3, 2, 4, 8),
    max_tokens=64,
)
# In the order in which they are checked.
WRONG: list[tuple[type[BundleRefused], str, dict[str, Any]]] = [
    (WrongModel, "model.architecture", {"architecture": "GPT2LMHeadModel"}),
    (WrongModel, "model.fingerprint", {"fingerprint": "sha256:" + "9" * 64}),
    (WrongRevision, "model.revision", {"revision": "0123abcd"}),
    (WrongGeometry, "model.num_layers", {"geometry": Geometry(4, 2, 4, 8)}),
    (WrongGeometry, "model.num_heads", {"geometry": Geometry(3, 1, 4, 8)}),
    (WrongGeometry, "model.head_dim", {"geometry": Geometry(3, 2, 8, 8)}),
    (WrongGeometry, "model.hidden_size", {"geometry": Geometry(3, 2, 4, 16)}),
    (WrongTokenizer, "tokenizer.digest", {"tokenizer": "sha256:" + "9" * 64}),
    (WrongChatTemplate, "chat_template.digest", {"chat_template": "sha256:" + "9" * 64}),
    (WrongChatTemplate, "chat_template.digest", {"chat_template": None}),
]


def test_the_same_model_under_another_name_and_dtype_is_accepted() -> None:
    check_identity(MANIFEST, LOADED)
    bare = render(make_draft(chat_template=None))[0]
    check_identity(bare, dataclasses.replace(LOADED, chat_template=None))


@pytest.mark.parametrize(("error", "field", "change"), WRONG)
def test_each_difference_has_its_own_error(error: type[BundleRefused], field: str, change: dict[str, Any]) -> None:
    with pytest.raises(BundleRefused) as caught:
        check_identity(MANIFEST, dataclasses.replace(LOADED, **change))
    assert type(caught.value) is error
    assert caught.value.field == field
    assert "tiny-llama at revision local" in caught.value.message
    for part in ("tiny:1", field, "expected", "found"):
        assert part in caught.value.message


@pytest.mark.parametrize("first", range(len(WRONG)))
def test_the_first_difference_in_order_is_the_one_named(first: int) -> None:
    changes: dict[str, Any] = {}
    for _, _, change in reversed(WRONG[first:]):
        changes |= change
    with pytest.raises(BundleRefused) as caught:
        check_identity(MANIFEST, dataclasses.replace(LOADED, **changes))
    assert caught.value.field == WRONG[first][1]


def test_a_template_where_the_bundle_had_none_is_refused() -> None:
    with pytest.raises(WrongChatTemplate, match="expected none"):
        check_identity(render(make_draft(chat_template=None))[0], LOADED)
