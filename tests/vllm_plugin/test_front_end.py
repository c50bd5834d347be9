"""How vLLM's own server has to be started, and what it loads, where a bundle is named."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from service.vllm_plugin import load
from service.vllm_plugin.front_end import GROUPS, name_plugins, unguarded

BUNDLE = {"HALLUTRACER_BUNDLE": "demo"}


@pytest.mark.parametrize(
    ("environment", "cure"),
    [
        (BUNDLE | {"VLLM_PLUGINS": "other,hallutracer", "VLLM_USE_RUST_FRONTEND": "1"}, "unset VLLM_USE_RUST_FRONTEND"),
        (BUNDLE | {"VLLM_PLUGINS": "hallutracer2"}, "add hallutracer"),
        (BUNDLE | {"VLLM_PLUGINS": ""}, "unset it"),
        (BUNDLE | {"VLLM_API_KEY": "REPLACE-ME-app-one"}, "placeholder"),
    ],
)
def test_an_unguarded_front_end_is_named_with_its_cure(environment: dict[str, str], cure: str) -> None:
    assert cure in (unguarded([], environment) or "")


@pytest.mark.parametrize("more", [{}, {"VLLM_PLUGINS": "other,hallutracer"}, {"VLLM_USE_RUST_FRONTEND": "0"}])
def test_guarded_front_ends_start(more: dict[str, str]) -> None:
    assert unguarded([], BUNDLE | more) is None


def test_an_examples_key_on_the_command_line_is_refused() -> None:
    for argv in (["--api-key", "k" * 40, "REPLACE-ME-app-one"], ["--api-key=REPLACE-ME-app-one"]):
        assert "placeholder" in (unguarded(argv, BUNDLE) or "")
    assert unguarded(["--api-key", "k" * 40, "--served-model-name", "change-me"], BUNDLE) is None


def test_naming_the_guard_leaves_no_other_plugin_out() -> None:
    environment: dict[str, str] = {}
    name_plugins(environment)
    named = environment["VLLM_PLUGINS"].split(",")
    assert "hallutracer" in named
    for group in GROUPS:
        assert {plugin.name for plugin in entry_points(group=f"vllm.{group}_plugins")} <= set(named)
    chosen = {"VLLM_PLUGINS": "hallutracer"}
    name_plugins(chosen)
    assert chosen == {"VLLM_PLUGINS": "hallutracer"}


def test_a_plugin_that_cannot_be_made_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs other exceptions of a plugin and starts without it."""
    monkeypatch.setitem(sys.modules, "service.vllm_plugin.plugin", None)  # an import that fails
    with pytest.raises(SystemExit, match="does not start without it"):
        load()
