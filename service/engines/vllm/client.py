"""A wrapper of ``AsyncLLM``, vLLM's own client: requests, calls to the workers, error translation and counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import numpy as np

from service.engines.base import Counters, TokenIds
from service.engines.bridge import LoopThread, run_on
from service.engines.vllm import launch
from service.engines.vllm.wire import probe_digest
from service.errors import EngineError, RequestError
from service.readout import Probes


class Client:
    """One started ``AsyncLLM`` on one event loop, where all coroutines run."""

    def __init__(
        self, async_llm: Any, loop: asyncio.AbstractEventLoop | None = None, generate: Any | None = None
    ) -> None:
        """``loop`` is the running loop to use; None starts one in a thread, which ``close`` ends.

        ``generate`` is vLLM's own method, where ``async_llm`` has another one in its place.
        """
        self._own_loop: LoopThread | None = None
        if loop is None:
            self._own_loop = LoopThread("vllm-client")
            loop = self._own_loop.loop
        self.loop = loop
        self.config = async_llm.vllm_config  # the ``VllmConfig`` that vLLM was started with
        self.counters = Counters()
        self._async_llm = async_llm
        self._generate = generate or async_llm.generate
        self._request_numbers = count()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether vLLM is running."""
        return not self._closed and not self._async_llm.errored

    def check_open(self) -> None:
        """Raise EngineError after ``close``."""
        if self._closed:
            raise EngineError("this engine is closed; load the model again")

    async def outputs(self, prompt: TokenIds, parameters: Any, priority: int = 0) -> AsyncGenerator[Any, None]:
        """Yield one request's ``RequestOutput``s; closing the generator cancels the request.

        Raises EngineError if vLLM failed or has ended, RequestError if it refuses the request.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.check_open()
        self.counters.open_continuations += 1
        first = True
        name = f"hallutracer-{next(self._request_numbers)}"
        stream = self._generate(tokens_input(list(prompt)), parameters, name, priority=priority)
        try:
            async for output in stream:
                if first:
                    self.counters.prefills += 1
                    self.counters.forward_tokens += len(prompt) - int(output.num_cached_tokens or 0)
                    first = False
                else:
                    self.counters.decode_steps += len(output.outputs[0].token_ids)
                    self.counters.forward_tokens += len(output.outputs[0].token_ids)
                yield output
        except EngineDeadError as error:
            raise EngineError(f"vLLM has ended ({error}); its own messages say why.  Restart the service") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed on this prompt: {error.__cause__ or error}") from error
        except VLLMClientError as error:
            raise RequestError(f"vLLM refuses this request: {error}") from error
        finally:
            self.counters.open_continuations -= 1
            await stream.aclose()

    async def describe(self) -> dict[str, Any]:
        """The first worker's description of its readout.  Raises EngineError if the worker class is not ours."""
        try:
            return dict((await self._async_llm.collective_rpc("hallutracer_describe"))[0])
        except Exception as error:
            raise EngineError(
                f"vLLM runs a worker without the readout ({error}); start it with --worker-cls {launch.WORKER}"
            ) from error

    async def write(self, slot: int, probes: Probes) -> str:
        """Write probes into a slot of their site on every worker; return their digest."""
        table = np.concatenate([probes.direction, probes.bias[:, None], probes.scale[:, None]], axis=1)
        head = [int(value) for value in probes.head]
        numbers = np.ascontiguousarray(table, np.float32).tobytes()
        await self._async_llm.collective_rpc("hallutracer_write", args=(slot, str(probes.site), head, numbers))
        return probe_digest(str(probes.site), head, numbers)

    def close(self) -> None:
        """Cancel all requests and end vLLM's processes.  Not to be called on the loop.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        # vLLM's output handler is cancelled before the processes end: it would report their end as a failure.
        if self._own_loop is not None:
            self._own_loop.close()
        elif self._async_llm.output_handler is not None:
            run_on(self.loop, _cancel(self._async_llm.output_handler))
        self._async_llm.shutdown()
        # ``AsyncLLM.__del__`` fails during interpreter exit, when vLLM's modules are gone already: free it now.
        self._async_llm = self._generate = None


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
