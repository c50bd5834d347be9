"""vLLM's own client, ``AsyncLLM``, seen through what this engine asks of it: outputs, and calls to its workers.

Its errors become ours here, and its work is counted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import numpy as np

from service.engines.base import Counters, TokenIds
from service.engines.vllm import launch as starting
from service.errors import EngineError, RequestError
from service.readout import Probes


class Client:
    """One started ``AsyncLLM`` on one event loop, where all coroutines run."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.counters = Counters()
        self._inner = inner
        self._numbers = count()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether vLLM still runs."""
        return not self._closed and not self._inner.errored

    @property
    def config(self) -> Any:
        """The ``VllmConfig`` it was started with."""
        return self._inner.vllm_config

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, neither here nor in vLLM."""
        return self.counters.open_continuations == 0 and not self._inner.output_processor.has_unfinished_requests()

    def check_open(self) -> None:
        """Raise EngineError after ``close``."""
        if self._closed:
            raise EngineError("this engine is closed; load the model again")

    async def outputs(self, prompt: TokenIds, parameters: Any) -> AsyncGenerator[Any, None]:
        """One request's ``RequestOutput``s.  Leaving early cancels it.

        Raises EngineError where vLLM failed or has ended, RequestError where it refuses the request.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.check_open()
        self.counters.open_continuations += 1
        first = True
        stream = self._inner.generate(tokens_input(list(prompt)), parameters, f"hallutracer-{next(self._numbers)}")
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
        """What the first worker says that it reads.  Raises EngineError where it is not ours."""
        try:
            return dict((await self._inner.collective_rpc("hallutracer_describe"))[0])
        except Exception as error:
            raise EngineError(
                f"vLLM runs a worker that does not read ({error}); start it with --worker-cls {starting.WORKER}"
            ) from error

    async def write(self, place: int, probes: Probes) -> None:
        """Put probes into a slot of every worker."""
        table = np.concatenate([probes.direction, probes.bias[:, None], probes.scale[:, None]], axis=1)
        head = [int(value) for value in probes.head]
        numbers = np.ascontiguousarray(table, np.float32).tobytes()
        await self._inner.collective_rpc("hallutracer_write", args=(place, str(probes.site), head, numbers))

    def close(self) -> bool:
        """End vLLM's processes; False where that has been done before.  Not to be called on the loop."""
        if self._closed:
            return False
        self._closed = True
        if self._inner.output_handler is not None:  # it would report the end of what it listens to as a failure
            self.loop.call_soon_threadsafe(self._inner.output_handler.cancel)
        self._inner.shutdown()
        return True
