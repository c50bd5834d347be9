"""Tests of the vLLM engine.  Those that need vLLM itself call ``installed.vllm_or_skip`` first."""
