"""Front ends that the plugin cannot guard are refused where a bundle is named for it."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from service.vllm_plugin import load
from service.vllm_plugin.front_end import GROUPS, is_front_end, name_plugins, unguarded

BUNDLE = {"HALLUTRACER_BUNDLE": "demo"}
GUARDED = BUNDLE | {"VLLM_PLUGINS": "other,hallutracer"}
SERVE = ["/usr/bin/vllm", "serve", "model"]
SERVER = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    ("module", "argv", "environment", "cure"),
    [
        ("", SERVE, GUARDED | {"VLLM_USE_RUST_FRONTEND": "1"}, "unset VLLM_USE_RUST_FRONTEND"),
        ("", [*SERVE, "--grpc"], GUARDED, "without --grpc"),
        ("vllm.entrypoints.grpc_server", ["grpc_server.py"], GUARDED, "without --grpc"),
        ("", ["vllm", "run-batch", "-i", "x"], GUARDED, "hallutracer score"),
        ("vllm.entrypoints.openai.run_batch", ["run_batch.py"], GUARDED, "hallutracer score"),
        (SERVER, ["api_server.py"], BUNDLE | {"VLLM_PLUGINS": "hallutracer2"}, "add hallutracer"),
        (SERVER, ["api_server.py"], BUNDLE | {"VLLM_PLUGINS": ""}, "unset it"),
        ("", SERVE, GUARDED | {"VLLM_API_KEY": "REPLACE-ME-app-one"}, "placeholder"),
        ("", [*SERVE, "--api-key", "k" * 40, "REPLACE-ME-app-one"], GUARDED, "placeholder"),
        (SERVER, ["api_server.py", "--api-key=REPLACE-ME-app-one"], GUARDED, "placeholder"),
    ],
)
def test_an_unguarded_front_end_is_named_with_its_cure(
    module: str, argv: list[str], environment: dict[str, str], cure: str
) -> None:
    assert cure in (unguarded(module, argv, environment) or "")


@pytest.mark.parametrize(
    ("module", "argv", "environment"),
    [
        ("", SERVE, GUARDED),
        ("", SERVE, BUNDLE),
        ("", [*SERVE, "--api-key", "k" * 40, "--served-model-name", "change-me"], GUARDED | {"VLLM_API_KEY": "k" * 40}),
        (SERVER, ["api_server.py"], GUARDED | {"VLLM_USE_RUST_FRONTEND": "0"}),
    ],
)
def test_guarded_front_ends_start(module: str, argv: list[str], environment: dict[str, str]) -> None:
    assert is_front_end(module, argv)
    assert unguarded(module, argv, environment) is None


@pytest.mark.parametrize(
    ("module", "argv"),
    [("", ["/usr/bin/hallutracer", "serve", "--engine", "vllm"]), ("service.cli.__main__", ["-c"]), ("", [])],
)
def test_our_own_commands_guard_themselves(module: str, argv: list[str]) -> None:
    assert not is_front_end(module, argv)


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
    import sys

    monkeypatch.setitem(sys.modules, "service.vllm_plugin.plugin", None)  # an import that fails
    with pytest.raises(SystemExit, match="does not start without it"):
        load()
