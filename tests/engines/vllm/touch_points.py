"""What of vLLM's insides HalluTracer calls, replaces or reads, looked up in vLLM's sources without
importing them.

    python -m tests.engines.vllm.touch_points              # the installed version
    python -m tests.engines.vllm.touch_points 0.33.0 # its wheel, which pip downloads; newest: the
    newest python -m tests.engines.vllm.touch_points --write-docs

It says what broke, and ends with 1 if anything did.  ``touch_points.md`` has the same list."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
OURS = ("service/engines/vllm", "service/vllm_plugin")
DOCS = Path(__file__).with_suffix(".md")
BEGIN, END = (
    "<!-- touch points: written by tests/engines/vllm/touch_points.py -->",
    "<!-- end of touch points -->",
)
PACKAGES = {"", "config", "platforms", "v1/engine"}  # of vLLM's modules that are imported from
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Read = Callable[[str], str | None]  # a path in the package -> its text


@dataclass(frozen=True)
class Point:
    """Something in a file of vLLM's that our ``ours`` depends on."""

    ours: str
    path: str
    name: str = ""  # of a class, a method or a function; empty: the file
    takes: str = ""  # a function's first parameters but ``self``; behind *: some of its parameters
    has: str = ""  # members of a class or names of a file
    order: tuple[str, ...] = ()  # texts of a function, in this order
    says: tuple[str, ...] = ()  # texts of a class or a file

    def __str__(self) -> str:
        if self.has:
            members = ", ".join(f"`{one}`" for one in self.has.split())
            return f"`{self.name}`: {members}" if self.name else members
        if self.says or self.order:
            said = ", ".join(f"`{one.rstrip('(')}`" for one in self.says or self.order)
            return (
                f"`{self.name}` {'calls, in this order,' if self.order else 'with'} {said}"
                if self.name
                else said
            )
        return (
            f"`{self.name}({', '.join(self.takes.replace('* ', '').split())})`"
            if self.takes
            else f"`{self.name}`"
        )


V1, V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
CORE, SCHEDULER = "v1/engine/core.py", "v1/core/sched/scheduler.py"
ADVANCES = "compute_prompt_token_id_logprobs"
POINTS = [
    # The worker and its two runners
    *(
        Point("worker", path, f"{name}.{method}", takes)
        for path, name in (
            ("v1/worker/cpu_worker.py", "CPUWorker"),
            ("v1/worker/gpu_worker.py", "Worker"),
        )
        for method, takes in (
            ("__init__", "vllm_config"),
            ("determine_available_memory", ""),
            ("compile_or_warm_up_model", ""),
        )
    ),
    Point("worker", "v1/worker/gpu_worker.py", "Worker.load_model"),
    Point("worker", "v1/worker/gpu_worker.py", "Worker", has="model_runner device"),
    Point(
        "worker", "v1/worker/worker_base.py", "WorkerBase", has="vllm_config model_runner device"
    ),
    Point("worker", "v1/worker/cpu_worker.py", "CPUWorker", has="model_runner device"),
    Point("worker", V1, "GPUModelRunner.execute_model", "scheduler_output intermediate_tensors"),
    Point("worker", V1, "GPUModelRunner._prepare_inputs", "scheduler_output num_scheduled_tokens"),
    Point("worker", V1, "GPUModelRunner._is_uniform_decode"),
    Point("worker", V1, "GPUModelRunner._model_forward"),
    Point("worker", V1, "GPUModelRunner._sample", "logits spec_decode_metadata"),
    Point("worker", V1, "GPUModelRunner.sample_tokens", "grammar_output"),
    Point(
        "worker",
        V1,
        "GPUModelRunner",
        has=(
            "model requests input_batch query_start_loc discard_request_mask execute_model_state"
            " device"
        ),
    ),
    # The rows are known before a graph is chosen and runs: in V2 it is chosen by what was gathered.
    Point(
        "worker",
        V1,
        "GPUModelRunner.execute_model",
        order=(
            "self._prepare_inputs(",
            "self._determine_batch_execution_and_padding(",
            "self._model_forward(",
        ),
    ),
    Point(
        "worker",
        V1,
        "GPUModelRunner._determine_batch_execution_and_padding",
        order=("self._is_uniform_decode(",),
    ),
    Point("worker", V1, "AsyncGPUModelRunnerOutput", has="_model_runner_output"),
    Point(
        "worker",
        "v1/worker/gpu_input_batch.py",
        "InputBatch",
        has="req_ids num_computed_tokens_cpu num_prompt_tokens generators",
    ),
    Point("worker", "v1/worker/gpu_input_batch.py", "CachedRequestState", has="sampling_params"),
    Point("worker", "v1/utils.py", "CpuGpuBuffer", has="np"),
    Point("worker", V2, "GPUModelRunner.add_requests", "scheduler_output"),
    Point("worker", V2, "GPUModelRunner.finish_requests", "scheduler_output"),
    Point("worker", V2, "GPUModelRunner.gather_batch_req_state", "scheduler_output dummy_run"),
    Point("worker", V2, "GPUModelRunner.prepare_inputs", "scheduler_output batch_req_state"),
    Point(
        "worker",
        V2,
        "GPUModelRunner.execute_model",
        "scheduler_output intermediate_tensors dummy_run",
    ),
    Point("worker", V2, "GPUModelRunner.sample", "hidden_states input_batch grammar_output"),
    Point("worker", V2, "GPUModelRunner.sample_tokens", "grammar_output"),
    Point("worker", V2, "GPUModelRunner", has="model req_states prompt_logprobs_worker"),
    Point(
        "worker",
        V2,
        "GPUModelRunner.execute_model",
        order=(
            "batch_req_state, uniform_tok_count = self.gather_batch_req_state(",
            "dispatch_cg_and_sync_dp(",
            "self.prepare_inputs(",
        ),
    ),
    Point("worker", V2, "GPUModelRunner.sample_tokens", order=("self.sample(", f"{ADVANCES}(")),
    Point("worker", V2, "GPUModelRunner", says=("self.model.compute_logits",)),
    Point("worker", V2, "BatchReqState", has="req_ids is_prefilling_np"),
    Point(
        "worker",
        "v1/worker/gpu/input_batch.py",
        "InputBatch",
        has=(
            "req_ids num_reqs idx_mapping_np query_start_loc_np num_computed_tokens_np"
            " prefill_len_np"
        ),
    ),
    Point("worker", "v1/worker/gpu/states.py", "RequestState", has="prompt_len"),
    Point("worker", "v1/worker/gpu/buffer_utils.py", "UvaBackedTensor", has="np"),
    Point(
        "worker",
        "v1/worker/gpu/sample/prompt_logprob.py",
        f"PromptLogprobsWorker.{ADVANCES}",
        "logits_fn hidden_states input_batch prompt_lens",
    ),
    Point(
        "worker",
        "v1/core/sched/output.py",
        "SchedulerOutput",
        has="scheduled_new_reqs finished_req_ids preempted_req_ids num_scheduled_tokens",
    ),
    Point("worker", "v1/core/sched/output.py", "NewRequestData", has="req_id sampling_params"),
    Point(
        "worker",
        "v1/outputs.py",
        "ModelRunnerOutput",
        has="prompt_token_id_logprobs_dict sampled_token_ids req_id_to_index",
    ),
    Point("worker", "v1/outputs.py", "SamplerOutput", has="sampled_token_ids"),
    Point("worker", "sequence.py", "IntermediateTensors", has="tensors"),
    Point(
        "worker",
        "distributed/parallel_state.py",
        "GroupCoordinator",
        has="rank_in_group world_size is_last_rank all_reduce all_gather",
    ),
    Point("reader", "distributed/parallel_state.py", "GroupCoordinator.all_gather", "input_ dim"),
    # The model
    Point(
        "attach",
        "model_executor/layers/attention/attention.py",
        "Attention",
        has="impl layer_name use_direct_call num_heads head_size head_size_v",
    ),
    Point("attach", "v1/attention/backend.py", "AttentionImpl.forward", "* output output_scale"),
    Point(
        "attach",
        "v1/attention/backends/cpu_attn.py",
        "CPUAttentionBackendImpl.forward",
        "* output output_scale",
    ),
    Point(
        "attach",
        "model_executor/layers/linear.py",
        "RowParallelLinear",
        has="input_size_per_partition",
    ),
    Point("attach", "model_executor/layers/linear.py", "LinearBase", has="input_size"),
    Point("attach", "model_executor/models/utils.py", "PPMissingLayer"),
    # The start
    Point(
        "launch",
        "engine/arg_utils.py",
        "EngineArgs",
        has=(
            "model revision tokenizer_revision dtype worker_cls trust_remote_code"
            " max_num_batched_tokens additional_config scheduling_policy kv_cache_memory_bytes"
            " gpu_memory_utilization tensor_parallel_size pipeline_parallel_size data_parallel_size"
            " create_engine_config"
        ),
    ),
    Point("launch", "engine/arg_utils.py", "AsyncEngineArgs", has="enable_log_requests"),
    Point(
        "launch",
        "v1/engine/async_llm.py",
        "AsyncLLM.from_vllm_config",
        "vllm_config * disable_log_stats",
    ),
    Point(
        "launch",
        "config/vllm.py",
        "VllmConfig",
        has=(
            "model_config parallel_config scheduler_config cache_config compilation_config"
            " speculative_config lora_config additional_config"
        ),
    ),
    Point(
        "launch",
        "config/parallel.py",
        "ParallelConfig",
        has=(
            "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size"
            " prefill_context_parallel_size use_ubatching enable_batch_sharded_sampling worker_cls"
        ),
    ),
    Point(
        "launch",
        "config/model.py",
        "ModelConfig",
        has=(
            "model revision trust_remote_code dtype quantization hf_config max_model_len"
            " enforce_eager runner_type"
        ),
    ),
    Point("launch", "config/cache.py", "CacheConfig", has="cache_dtype kv_sharing_fast_prefill"),
    Point(
        "launch",
        "config/scheduler.py",
        "SchedulerConfig",
        has="max_num_batched_tokens max_num_seqs stream_interval",
    ),
    Point(
        "launch",
        "config/compilation.py",
        "CompilationConfig",
        has="cudagraph_mode pass_config splitting_ops",
    ),
    Point("launch", "config/compilation.py", "CUDAGraphMode", has="FULL mixed_mode"),
    Point("launch", "config/compilation.py", "PassConfig", has="fuse_attn_quant"),
    Point(
        "launch",
        "utils/torch_utils.py",
        "resolve_kv_cache_dtype_string",
        "kv_cache_dtype model_config",
    ),
    Point("launch", "platforms/interface.py", "Platform", has="is_cpu"),
    Point(
        "launch",
        "envs.py",
        says=(
            "VLLM_CPU_KVCACHE_SPACE",
            "VLLM_CPU_OMP_THREADS_BIND",
            "VLLM_WORKER_MULTIPROC_METHOD",
            "VLLM_LOGGING_LEVEL",
            "VLLM_NO_USAGE_STATS",
        ),
    ),
    # The request side: what a request carries there and back
    Point(
        "engine",
        "v1/engine/async_llm.py",
        "AsyncLLM.generate",
        "prompt sampling_params request_id * priority",
    ),
    Point("engine", "v1/engine/async_llm.py", "AsyncLLM.collective_rpc", "method * args"),
    Point(
        "engine",
        "v1/engine/async_llm.py",
        "AsyncLLM",
        has="vllm_config output_handler errored shutdown",
    ),
    Point("plugin", "v1/engine/async_llm.py", "AsyncLLM", has="engine_core"),
    Point("plugin", "v1/engine/core_client.py", "AsyncMPClient", has="client_count client_index"),
    Point("engine", "inputs/engine.py", "tokens_input", "prompt_token_ids"),
    Point(
        "engine",
        "outputs.py",
        "RequestOutput",
        has="outputs finished prompt_token_ids prompt_token_id_logprobs num_cached_tokens metrics",
    ),
    Point("client", "outputs.py", "RequestOutput.add", "next_output aggregate"),
    Point(
        "engine",
        "outputs.py",
        "CompletionOutput",
        has="index text token_ids finish_reason stop_reason logprobs cumulative_logprob",
    ),
    Point(
        "client",
        "v1/metrics/stats.py",
        "RequestStateStats",
        has="queued_ts scheduled_ts first_token_ts",
    ),
    Point(
        "client",
        "sampling_params.py",
        "SamplingParams",
        has=(
            "n max_tokens min_tokens temperature top_p seed stop stop_token_ids detokenize"
            " output_kind extra_args skip_clone ignore_eos structured_outputs presence_penalty"
            " frequency_penalty repetition_penalty logit_bias bad_words allowed_token_ids"
            " prompt_logprob_token_ids clone"
        ),
    ),
    Point("client", "sampling_params.py", "StructuredOutputsParams", has="json"),
    Point("launch", "config/structured_outputs.py", "StructuredOutputsConfig", has="backend"),
    Point("client", "sampling_params.py", "RequestOutputKind", has="DELTA CUMULATIVE FINAL_ONLY"),
    Point(
        "wire",
        "v1/engine/__init__.py",
        "EngineCoreOutput",
        has="request_id new_token_ids finish_reason prompt_token_id_logprobs",
    ),
    Point("wire", "v1/engine/output_processor.py", says=("prompt_token_id_logprobs",)),
    # The gates
    Point(
        "front_end",
        "engine/arg_utils.py",
        "EngineArgs",
        has="worker_cls additional_config create_engine_config",
    ),
    Point("front_end", "v1/executor/abstract.py", "Executor.get_class", "vllm_config"),
    Point("front_end", "v1/executor/abstract.py", "Executor.__init__", "vllm_config"),
    Point("front_end", CORE, "EngineCore.__init__", "vllm_config"),
    Point("front_end", CORE, "EngineCore.add_request", "request"),
    Point("front_end", CORE, "EngineCoreProc.run_engine_core"),
    Point("front_end", "entrypoints/launchers/api_server/entry.py", "run_server_worker"),
    Point("front_end", "entrypoints/cli/serve.py", "run_multi_api_server"),
    Point("front_end", "entrypoints/cli/serve.py", "run_headless"),
    Point("front_end", "envs.py", says=("VLLM_PLUGINS", "VLLM_USE_RUST_FRONTEND", "VLLM_API_KEY")),
    Point(
        "front_end",
        "renderers/base.py",
        "BaseRenderer.render_chat_async",
        "conversations chat_params",
    ),
    Point("front_end", "renderers/params.py", "ChatParams", has="chat_template_kwargs"),
    Point(
        "front_end",
        "renderers/online_renderer.py",
        "OnlineRenderer.preprocess_chat",
        order=("renderer.render_chat_async(",),
    ),
    Point(
        "front_end",
        "plugins/__init__.py",
        says=(
            "vllm.general_plugins",
            "vllm.io_processor_plugins",
            "vllm.platform_plugins",
            "vllm.stat_logger_plugins",
            "vllm.endpoint_plugins",
        ),
    ),
    Point(
        "engine_gate",
        CORE,
        "EngineCore",
        has="vllm_config scheduler step_fn shutdown model_executor add_lora is_sleeping",
    ),
    Point("engine_gate", CORE, "EngineCore.add_lora", "lora_request"),
    Point("engine_gate", CORE, "EngineCore.collective_rpc", "method * args"),
    Point("engine_gate", CORE, "EngineCore.preprocess_add_request", "request"),
    Point("engine_gate", CORE, "EngineCore.post_step", "model_executed"),
    Point("engine_gate", CORE, "EngineCore.reset_prefix_cache"),
    Point("engine_gate", SCHEDULER, "Scheduler", has="requests add_request"),
    Point(
        "engine_gate",
        SCHEDULER,
        "Scheduler.update_from_output",
        "scheduler_output model_runner_output",
    ),
    Point(
        "engine_gate", SCHEDULER, "Scheduler._update_request_with_output", "request new_token_ids"
    ),
    Point(
        "engine_gate",
        SCHEDULER,
        "Scheduler.update_from_output",
        order=(
            "model_runner_output.prompt_token_id_logprobs_dict",
            "self._update_request_with_output(",
        ),
    ),
    Point(
        "engine_gate",
        "v1/request.py",
        "Request",
        has=(
            "request_id prompt_token_ids prompt_embeds resumable sampling_params num_output_tokens"
            " status stop_reason"
        ),
    ),
    Point("engine_gate", "v1/request.py", "RequestStatus", has="FINISHED_STOPPED"),
    Point(
        "engine_gate",
        "v1/engine/__init__.py",
        "EngineCoreRequest",
        has=(
            "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time"
            " lora_request cache_salt data_parallel_rank priority"
        ),
    ),
    Point("engine_gate", "v1/engine/__init__.py", "EngineCoreOutputs", has="outputs"),
    # vLLM's own server
    Point(
        "plugin",
        "plugins/endpoint_plugins/interface.py",
        "EndpointPlugin",
        has="name required_tasks",
    ),
    Point("plugin", "plugins/endpoint_plugins/interface.py", "EndpointPlugin.attach_router", "app"),
    Point(
        "plugin",
        "plugins/endpoint_plugins/interface.py",
        "EndpointPlugin.init_state",
        "engine_client state args",
    ),
    Point(
        "plugin",
        "entrypoints/openai/models/serving.py",
        "OpenAIServingModels.load_lora_adapter",
        "request",
    ),
    Point(
        "middleware",
        "entrypoints/openai/chat_completion/protocol.py",
        "ChatCompletionRequest",
        has=(
            "messages continue_final_message add_generation_prompt chat_template"
            " chat_template_kwargs add_special_tokens truncate_prompt_tokens kv_transfer_params"
            " vllm_xargs use_beam_search"
        ),
    ),
    Point(
        "middleware",
        "entrypoints/openai/completion/protocol.py",
        "CompletionRequest",
        has="prompt vllm_xargs use_beam_search",
    ),
    Point("rendering", "renderers/hf.py", "_consolidate_system_messages", "conversation"),
    Point("note", "inputs/engine.py", "TokensInput", has="prompt_token_ids"),
    Point(
        "generation",
        "sampling_params.py",
        "SamplingParams",
        has="temperature max_tokens extra_args",
    ),
    Point("generation", "exceptions.py", "VLLMValidationError.__init__", "message * parameter"),
    Point("answers", "logprobs.py", "Logprob", has="logprob rank decoded_token"),
]


class Sources:
    """A version of vLLM: its files as text."""

    def __init__(self, read: Read) -> None:
        self.text = cache(lambda path: read(path) or "")
        self.tree = cache(lambda path: ast.parse(self.text(path)))
        self.members = cache(members)  # of a node

    def broken(self, point: Point) -> str | None:
        """Return what ``point`` asks for and is not there; None: it holds."""
        if not self.text(point.path):
            return "no such file"
        node = self._find(point.path, point.name)
        if node is None:
            return f"no {point.name}"
        text = self.text(point.path)
        if isinstance(node, DEFINITIONS):
            text = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
        if missing := [one for one in point.says if one not in text]:
            return f"nothing says {', '.join(missing)}"
        places = [text.find(one) for one in point.order]
        if min(places, default=0) < 0 or places != sorted(places):
            return f"{point.name} does not call, in this order: {', '.join(point.order)}"
        if missing := [one for one in point.has.split() if one not in self.members(node)]:
            return f"{point.name} has no {', '.join(missing)}"
        if point.takes:
            return self._called(node, point)
        return None

    def imports(self, module: str, name: str) -> bool:
        """Return whether ``from module import name`` finds something."""
        folder = module.partition(".")[2].replace(".", "/")
        files = [f"{folder}/__init__.py".lstrip("/"), f"{folder}.py"]
        if any(self.text(f"{folder}/{name}{end}".lstrip("/")) for end in (".py", "/__init__.py")):
            return True
        trees = [self.tree(file) for file in files if self.text(file)]
        return any(name in self.members(tree) for tree in trees)

    def _find(self, path: str, name: str) -> ast.AST | None:
        node: ast.AST = self.tree(path)
        for part in filter(None, name.split(".")):
            found = next((one for one in defined(node) if one.name == part), None)
            if found is None:
                return None
            node = found
        return node

    def _called(self, node: ast.AST, point: Point) -> str | None:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"{point.name} is no function"
        names = [
            one.arg
            for one in (*node.args.posonlyargs, *node.args.args)
            if one.arg not in ("self", "cls")
        ]
        first, _, some = point.takes.partition("*")
        every = [*names, *(one.arg for one in node.args.kwonlyargs)]
        if names[: len(first.split())] != first.split() or not set(some.split()) <= set(every):
            return f"{point.name} takes ({', '.join(every)}), not ({point.takes})"
        return None


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a module, a class or a function, also under a condition."""
    for one in ast.iter_child_nodes(node):
        yield one
        if isinstance(one, ast.If | ast.Try):
            yield from statements(one)


def defined(node: ast.AST) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the classes and functions that stand in ``node``."""
    return [one for one in statements(node) if isinstance(one, DEFINITIONS)]


def members(node: ast.AST) -> set[str]:
    """Return the names that a class or a module has: definitions, fields, what its methods set,
    what it hands on."""
    found, module = {one.name for one in defined(node)}, isinstance(node, ast.Module)
    for one in statements(node) if module else ast.walk(node):
        match one:
            case ast.Assign() | ast.AnnAssign():
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                for inner in (inner for target in targets for inner in ast.walk(target)):
                    if isinstance(inner, ast.Name):
                        found.add(inner.id)
                    elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                        found.add(inner.attr)
                if module and isinstance(
                    one.value, ast.Dict
                ):  # names that vLLM's package imports when they are used
                    found |= {
                        str(key.value) for key in one.value.keys if isinstance(key, ast.Constant)
                    }
            case ast.ImportFrom():
                found |= {name.asname or name.name for name in one.names}
    return found


def imported() -> Iterator[tuple[str, str, str]]:
    """Yield our file, vLLM's module and the name for each import of vLLM in our sources."""
    for file in (file for folder in OURS for file in sorted((ROOT / folder).glob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or ""):
                yield from ((file.stem, str(node.module), name.name) for name in node.names)


def broken(sources: Sources) -> list[str]:
    """Return a line for each import and point that does not hold."""
    found = [
        f"service: {ours}.py imports {name} from {module}: not there"
        for ours, module, name in imported()
        if not sources.imports(module, name)
    ]
    found += [
        f"{point.ours}.py: vllm/{point.path}: {problem}"
        for point in POINTS
        if (problem := sources.broken(point)) is not None
    ]
    return found


def table() -> str:
    """Return the list as ``touch_points.md`` has it: a row for each file of vLLM's."""
    rows: dict[str, tuple[list[str], set[str]]] = {}
    imports = [
        (module.partition(".")[2].replace(".", "/"), f"`{name}`", ours)
        for ours, module, name in imported()
    ]
    for path, text, ours in [(point.path, str(point), point.ours) for point in POINTS] + imports:
        file = (
            path
            if path.endswith(".py")
            else f"{path}/__init__.py".lstrip("/")
            if path in PACKAGES
            else f"{path}.py"
        )
        texts, files = rows.setdefault(file, ([], set()))
        if not any(text.strip("`") in one for one in texts):
            texts.append(text)
        files.add(f"`{ours}`")
    lines = [
        f"| `{path}` | {'; '.join(texts)} | {', '.join(sorted(files))} |"
        for path, (texts, files) in rows.items()
    ]
    return "\n".join(
        ["| vLLM's file | what of it | in our |", "| --- | --- | --- |", *sorted(lines)]
    )


def between(text: str, begin: str, end: str, inner: str) -> str:
    """Return ``text`` with ``inner`` between two lines.  Raises ValueError where they are not there
    once, in order."""
    before, found, rest = text.partition(begin + "\n")
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"no {begin} ... {end}")
    return f"{before}{begin}\n{inner}\n{end}{after}"


def in_folder(package: Path) -> Sources:
    """Return the sources of an unpacked vLLM, the folder that is named ``vllm``."""

    def read(path: str) -> str | None:
        return (package / path).read_text(encoding="utf-8") if (package / path).is_file() else None

    return Sources(read)


@contextmanager
def of_version(version: str) -> Iterator[Sources]:
    """The sources in a version's wheel, "newest": of the newest; or in a wheel that is here."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(version)
        if not wheel.is_file():
            wanted = "vllm" if version == "newest" else f"vllm=={version}"
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            subprocess.run([*command, "--dest", folder, wanted], check=True)
            [wheel] = Path(folder).glob("*.whl")
        print(wheel.name)
        with zipfile.ZipFile(wheel) as files:
            names = set(files.namelist())
            yield Sources(
                lambda path: (
                    files.read(f"vllm/{path}").decode() if f"vllm/{path}" in names else None
                )
            )


def installed() -> Sources:
    """Return the installed vLLM's sources, which are not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed; name a version")
    return in_folder(Path(spec.submodule_search_locations[0]))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?", help="such as 0.33.0; newest; or a wheel's file")
    parser.add_argument("--write-docs", action="store_true")
    given = parser.parse_args(argv)
    if given.write_docs:
        DOCS.write_text(
            between(DOCS.read_text(encoding="utf-8"), BEGIN, END, table()), encoding="utf-8"
        )
        return 0
    if given.version:
        with of_version(given.version) as sources:
            found = broken(sources)
    else:
        found = broken(installed())
    count = len(POINTS) + len(list(imported()))
    print("\n".join([*found, f"{len(found)} of {count} touch points broke"]))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
