"""Processes that work through a list of tasks, whose results come back in the list's order.

Each worker has a pipe of its own and one task at a time, so that a worker can be ended, or die, at any moment without
leaving a lock held or a message cut short for the others. (A ProcessPoolExecutor shares its queues: of four that were
interrupted while workers sent results, two hung for ever on a message that was cut short.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from meshwright.errors import UserError

RESULTS_AHEAD = 4  # results per worker that may wait for an earlier one
DIED = "a worker process ended early (the machine may be out of memory): try fewer with --workers"

T = TypeVar("T")
R = TypeVar("R")
Make = Callable[..., Callable[[T], R]]


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection[Any, Any]
    task: int | None = None  # the number of the task it is working on


def map_in_order(make: Make[T, R], args: tuple[Any, ...], tasks: Iterator[T], count: int) -> Generator[R, None, None]:
    """Yields the tasks' results, in order. `make(*args)` runs once in each of `count` processes and returns the
    function that is called with the tasks. `make`, `args`, tasks and results are sent by pickle. A UserError in a
    worker is raised here; closing the generator ends the workers at once."""
    context = multiprocessing.get_context("forkserver")
    workers: list[Worker] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
            process.start()
            theirs.close()
            workers.append(Worker(process, ours))
        yield from _results(workers, tasks)
    finally:
        for worker in workers:  # a server that was started while signals were ignored makes workers that ignore SIGTERM
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _results(workers: list[Worker], tasks: Iterator[Any]) -> Iterator[Any]:
    ready: dict[int, Any] = {}
    by_pipe: dict[Any, Worker] = {worker.pipe: worker for worker in workers}
    sent = given = 0
    while True:
        for worker in workers:
            if worker.task is None and sent - given < RESULTS_AHEAD * len(workers):
                task = next(tasks, None)
                if task is None:
                    break
                _send(worker, task)
                worker.task, sent = sent, sent + 1
        if given == sent:
            return
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]
            result = _receive(worker)  # an idle worker can only report that it has ended
            assert worker.task is not None
            ready[worker.task], worker.task = result, None
        while given in ready:
            yield ready.pop(given)
            given += 1


def _send(worker: Worker, task: Any) -> None:
    try:
        worker.pipe.send(task)
    except OSError:
        raise UserError(DIED) from None


def _receive(worker: Worker) -> Any:
    try:
        kind, value = worker.pipe.recv()
    except (EOFError, OSError):
        raise UserError(DIED) from None
    if kind == "mistake":
        raise UserError(value)
    if kind == "failure":
        raise RuntimeError(f"a worker failed:\n{value}")
    return value


def _serve(pipe: Connection[Any, Any], make: Make[Any, Any], args: tuple[Any, ...]) -> None:
    """Runs in a worker until its pipe closes. It ignores interrupts, which the main process handles, and ends as soon
    as that process is gone, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    function = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            function = function or make(*args)
            answer = ("result", function(task))
        except UserError as error:
            answer = ("mistake", str(error))
        except Exception:
            answer = ("failure", traceback.format_exc())
        pipe.send(answer)
