"""The waiting room: who may come in, and which of those waiting make the next batch.  No threads, no clock, no engine.

A batch is a bucket of like lengths around the prompt that has waited longest: those nearest to it in length join while
they fit and the padding stays small, so nobody waits for ever and no forward pass is mostly padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from service.serving import admission
from service.serving.job import Job

MOST_PADDING = 1.25  # padded over real tokens in one forward pass
FREE_PADDING = 128  # padded tokens up to which a forward pass is too small for padding to matter
LOOKED_AT = 256  # waiting jobs among which a batch is chosen


class WaitingRoom:
    """Jobs in order of arrival, at most ``max_prompts``.  Not thread-safe: its owner holds a lock."""

    def __init__(self, max_prompts: int, max_batch_tokens: int, max_kv_tokens: int) -> None:
        self._max_prompts = max_prompts
        self._max_batch_tokens = max_batch_tokens
        self._max_kv_tokens = max_kv_tokens
        self._jobs: deque[Job] = deque()
        self._tokens = {True: 0, False: 0}  # of prompts that may go on decoding, and of those that are only scored

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def full(self) -> bool:
        """Whether not even one more prompt may come in."""
        return len(self._jobs) >= self._max_prompts

    def check_space(
        self, prompts: int, seconds: float, tokens_per_second: float | None, *, continues: bool = False
    ) -> None:
        """Raise Overloaded as ``admission.check_space`` does.

        Scores pass answers that wait for room in the cache, so these do not count for one that does not ``continue``.
        """
        admission.check_space(
            prompts,
            held=len(self._jobs),
            most=self._max_prompts,
            ahead=self._tokens[False] + (self._tokens[True] if continues else 0),
            seconds=seconds,
            tokens_per_second=tokens_per_second,
        )

    def add(self, jobs: Sequence[Job]) -> None:
        """Let jobs in that ``check_space`` has let through."""
        self._jobs.extend(jobs)
        for job in jobs:
            self._tokens[job.continues] += len(job.token_ids)

    def remove(self, condition: Callable[[Job], bool]) -> list[Job]:
        """Take out every job that ``condition`` names."""
        out = [job for job in self._jobs if condition(job)]
        self._take(out)
        return out

    def startable(self, kv_held: int) -> bool:
        """Whether anyone waits who could start now."""
        return next(self._startable(kv_held), None) is not None

    def gather(self, kv_held: int) -> list[Job]:
        """The next batch; empty where none can start.

        Jobs that may go on decoding keep a KV cache and come in batches of their own, as long as ``kv_held`` and
        theirs stay within the limit; one that is larger than the whole limit goes alone, when nothing is held.
        """
        waiting = list(islice(self._startable(kv_held), LOOKED_AT))
        if not waiting:
            return []
        oldest = waiting[0]
        own = len(oldest.token_ids)
        alike = [job for job in waiting[1:] if job.continues == oldest.continues]
        alike.sort(key=lambda job: abs(len(job.token_ids) - own))  # stable: among equals the one that came first
        batch, longest, total = [oldest], own, own
        for job in alike:
            length = len(job.token_ids)
            padded = max(longest, length) * (len(batch) + 1)
            if padded > self._max_batch_tokens or padded > max(FREE_PADDING, MOST_PADDING * (total + length)):
                break
            batch.append(job)
            longest, total = max(longest, length), total + length
        self._take(batch)
        return batch

    def _startable(self, kv_held: int) -> Iterator[Job]:
        """Jobs in order of arrival, without those for whose cache there is no room now."""
        blocked = False
        for job in self._jobs:
            if job.continues:
                # Nobody overtakes a job that waits for room: a large one would never find any.
                blocked = blocked or (kv_held > 0 and kv_held + job.kv_tokens > self._max_kv_tokens)
                if blocked:
                    continue
                kv_held += job.kv_tokens
            yield job

    def _take(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        gone = set(jobs)
        self._jobs = deque(job for job in self._jobs if job not in gone)
        for job in jobs:
            self._tokens[job.continues] -= len(job.token_ids)
