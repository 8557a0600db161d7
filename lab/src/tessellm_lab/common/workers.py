"""One function on many arguments, by several processes of one thread each."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import Any

import torch


def by_processes(work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Any]:
    """What `work` gives for each job's arguments, in order; in this process where one is enough. A Ctrl-C, which the
    terminal sends to all of them, is heard by this one alone, and ends the others at once."""
    processes = min(processes, len(jobs))
    if processes < 2:
        yield from (work(*job) for job in jobs)
        return
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as workers:
        earlier = set(active_children())
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which they inherit
        try:
            futures = [workers.submit(work, *job) for job in jobs]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        try:
            for future in futures:
                yield future.result()
        except Exception:
            workers.shutdown(cancel_futures=True)
            raise
        except BaseException:
            for process in set(active_children()) - earlier:
                process.terminate()
            raise
