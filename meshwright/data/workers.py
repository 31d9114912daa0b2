"""Run a list of tasks in worker processes, and return the results in the list's order.

Each worker has its own pipe and one task at a time. It can be ended, or die, at any moment without leaving a lock held
or a message incomplete for the others. (A ProcessPoolExecutor shares its queues: of four that were interrupted while
workers sent results, two hung for ever on an incomplete message.)
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

RESULTS_AHEAD = 4  # tasks per worker that may be sent before the oldest result is returned
DIED = "a worker process ended early (the machine may be out of memory): try fewer with --workers"

T = TypeVar("T")
R = TypeVar("R")
MakeWorker = Callable[..., Callable[[T], R]]


@dataclass
class Worker:
    """A worker process and our end of its pipe."""

    process: BaseProcess
    pipe: Connection[Any, Any]
    task: int | None = None  # the number of the task it is working on


def map_in_order(
    make: MakeWorker[T, R], args: tuple[Any, ...], tasks: Iterator[T], count: int
) -> Generator[R, None, None]:
    """Yield the tasks' results, in order.

    `make(*args)` runs once in each of `count` processes and returns the function that is called with the tasks. `make`,
    `args`, tasks and results are pickled. A UserError in a worker is raised here. Closing the generator ends the
    workers at once.
    """
    context = multiprocessing.get_context("forkserver")
    workers: list[Worker] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
            process.start()
            # While this process holds the worker's end, a dead worker would not show as the end of the pipe.
            theirs.close()
            workers.append(Worker(process, ours))
        yield from _results(workers, tasks)
    finally:
        # SIGKILL, because workers ignore SIGTERM if their fork server was started while signals were ignored.
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _results(workers: list[Worker], tasks: Iterator[Any]) -> Iterator[Any]:
    """Send tasks to idle workers, and yield the results in the order of the tasks."""
    ready: dict[int, Any] = {}  # results that wait for an earlier one, by task number
    by_pipe: dict[Any, Worker] = {worker.pipe: worker for worker in workers}
    sent = returned = 0
    while True:
        for worker in workers:
            if worker.task is None and sent - returned < RESULTS_AHEAD * len(workers):
                task = next(tasks, None)
                if task is None:
                    break
                _send(worker, task)
                worker.task, sent = sent, sent + 1
        if returned == sent:
            return
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]
            result = _receive(worker)  # raises for an idle worker: its pipe is only readable if the process has ended
            assert worker.task is not None
            ready[worker.task], worker.task = result, None
        while returned in ready:
            yield ready.pop(returned)
            returned += 1


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


def _serve(pipe: Connection[Any, Any], make: MakeWorker[Any, Any], args: tuple[Any, ...]) -> None:
    """Serve tasks in a worker process until its pipe closes.

    The worker ignores interrupts, which the main process handles. It ends as soon as the main process is gone, however
    that ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)  # an exception would only end this thread

    threading.Thread(target=exit_with_parent, daemon=True).start()
    function = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            # Made at the first task, so that its errors are reported like those of tasks.
            function = function or make(*args)
            answer = ("result", function(task))
        except UserError as error:
            answer = ("mistake", str(error))
        except Exception:
            answer = ("failure", traceback.format_exc())
        pipe.send(answer)
