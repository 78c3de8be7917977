"""The engine's own thread in a serving process: it never waits for whoever submits or collects."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from generation.engine.engine import Engine
from generation.interface import Output

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0


class EngineThread:
    """Runs `engine` until `stop`. On rank 0 it steps and hands outputs on; on the others it follows.

    A failure of the engine, or a step that takes longer than `step_timeout` seconds while work is waiting,
    ends the whole process at once: the ranks share one state, so only a new start of all of them helps.

    Args:
        deliver: gets the outputs of each step, in the engine's thread.
        cores: the only ones this thread, and those it starts, run on.
        die: ends the process with the given status.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Output]], None],
        *,
        step_timeout: float = 60.0,
        cores: set[int] | None = None,
        die: Callable[[int], None] = os._exit,
    ) -> None:
        self.engine = engine
        self._deliver = deliver
        self._step_timeout = step_timeout
        self._cores = cores
        self._die = die
        self._stopping = threading.Event()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the step it is in."""
        self._stopping.set()
        self.engine.work.set()
        self._thread.join(timeout)

    def _main(self) -> None:
        try:
            if self._cores is not None:
                os.sched_setaffinity(0, self._cores)  # of this thread only
            if self.engine.model.comm.rank == 0:
                self._lead()
            else:
                self.engine.follow()
        except BaseException:
            if self._stopping.is_set():
                return
            logger.critical("the engine failed; ending this process so that all ranks start anew", exc_info=True)
            self._die(1)

    def _lead(self) -> None:
        engine = self.engine
        while not self._stopping.is_set():
            if not engine.busy:
                if not engine.work.wait(HEARTBEAT_S):
                    engine.heartbeat()
                engine.work.clear()
                continue
            self._step_began = time.monotonic()
            outputs = engine.step()
            self._step_began = None
            if outputs:
                self._deliver(outputs)
        engine.heartbeat(stop=True)

    def _watch(self) -> None:
        while not self._stopping.wait(min(1.0, self._step_timeout / 4)):
            began = self._step_began
            if began is not None and time.monotonic() - began > self._step_timeout:
                logger.critical(
                    "a step has taken over %g s (step_timeout): a rank hangs; ending this process so that all "
                    "ranks start anew",
                    self._step_timeout,
                )
                self._die(1)
                return
