"""A server whose worker reads wrong: nothing that was to be gated gets through, everything else does."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from tests.vllm_plugin.server import MODEL, serving  # noqa: E402


@pytest.mark.long
def test_a_gate_that_is_not_there_does_not_stand_open(tmp_path: Path) -> None:
    wrong = ("--worker-cls", "tests.parity.faulty.RowTooEarly")
    with serving(tmp_path / "log", *wrong, ready=False) as url:
        said = httpx.get(f"{url}/health/ready").json()["error"]["message"]
        assert "self-test" in said
        assert httpx.post(f"{url}/v1/risk/score", json={"prompt": "x"}).status_code == 503
        for stream in (False, True):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": stream}
            passed = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert passed.status_code == 200
            assert "self-test" in passed.text
            gated = body | {"vllm_xargs": {"hallutracer_policy": "gate"}}
            refused = httpx.post(f"{url}/v1/completions", json=gated, timeout=60)
            assert refused.status_code == 503, refused.text
            assert "retry-after" in refused.headers
