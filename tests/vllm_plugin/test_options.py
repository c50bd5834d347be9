"""What the plugin refuses before vLLM starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import HalluTracerError
from service.vllm_plugin.options import read_options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[a]\naction = "annotate"', "action 'annotate' needs HalluTracer's own service"),
        ('[a]\naction = "retrieve"', "action 'retrieve' needs"),
        ('[a]\naction = "fallback"\nupstream = "http://b/v1"\nupstream_model = "m"', "action 'fallback' needs"),
        ('[[rule]]\npolicy = "gate"', "[[rule]] in the policies file needs"),
    ],
)
def test_policies_that_only_our_own_service_has(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(text)
    with pytest.raises(HalluTracerError) as refused:
        read_options({"HALLUTRACER_BUNDLE": "demo", "HALLUTRACER_POLICIES": str(path)})
    assert said in str(refused.value)
    path.write_text('[a]\naction = "block"')
    assert "a" in read_options({"HALLUTRACER_BUNDLE": "demo", "HALLUTRACER_POLICIES": str(path)}).policies.named
