"""A worker's process: LitServe's LitAPI and LitLoop around an engine and the worker that feeds it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from typing import Any

import litserve
from litserve.callbacks import CallbackRunner
from litserve.loops import LitLoop, inference_worker
from litserve.transport.base import MessageTransport
from litserve.utils import WorkerSetupStatus

from models.checkpoint import CheckpointError, FidelityError
from service.conversion import ConversionError
from service.engine import Engine
from service.settings import configure_logging
from service.slots import ProcessState
from service.worker import Worker, WorkerOptions

log = logging.getLogger(__name__)


def follow_parent(parent: int) -> None:
    """Make this child ignore the signals meant for its parent, end at once when the parent ends, and unblock what it blocked."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def build_engine(options: WorkerOptions, device: str) -> Engine:
    """The engine that the settings ask for: with `auto`, OpenVINO on a CPU, and torch on a GPU or where OpenVINO can't.

    Raises CheckpointError, FidelityError and, where OpenVINO was asked for by name, ConversionError.
    """
    fallen = ""
    if options.engine != "torch" and device == "cpu":
        from service.openvino_engine import OpenVinoEngine

        try:
            return OpenVinoEngine(
                options.checkpoint,
                precision=options.precision,
                max_batch_size=options.max_batch_size,
                threads=options.threads,
                cache_dir=options.cache_dir,
            )
        except CheckpointError:
            raise
        except (ConversionError, FidelityError, RuntimeError) as error:
            if options.engine == "openvino":
                raise
            fallen = f"OpenVINO can't serve this model ({' '.join(str(error).split())[:200]}); "
            log.warning("%sfalling back to torch", fallen)
    from models import checkpoint
    from service.torch_engine import TorchEngine

    engine = TorchEngine(
        checkpoint.load(options.checkpoint),
        device,
        precision=options.precision,
        max_batch_size=options.max_batch_size,
        compiled=options.compiled,
        cache_dir=options.cache_dir,
        threads=options.threads,
    )
    engine.why = fallen + engine.why
    return engine


class ClassifierAPI(litserve.LitAPI):  # type: ignore[misc]  # LitServe carries no types
    """What LitServe runs in each worker process."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(max_batch_size=options.max_batch_size, loop=_SlotLoop())
        self.options = options
        self.index = -1

    def setup(self, device: str) -> None:
        """Load the checkpoint onto `device`, or write the reason why not into the worker's row and end."""
        row = self.options.memory.workers[self.index]
        row["device"] = device.encode()
        try:
            try:
                engine = build_engine(self.options, device)
                served = self.options.header
                if (engine.header.version, engine.header.name) != (served.version, served.name):
                    raise CheckpointError(self.options.checkpoint, "file", "replaced while the server started; start again")
            except (CheckpointError, FidelityError, ConversionError) as error:
                row["reason"] = str(error).encode()[:1000]
                raise SystemExit(1) from None
            self.worker = Worker(self.options, self.index, engine)
        except Exception as error:
            log.exception("worker %d could not start", self.index)
            row["reason"] = f"{type(error).__name__}: {error}".encode()[:1000]
            raise SystemExit(1) from None
        row["beat"] = time.monotonic()


class _SlotLoop(LitLoop):  # type: ignore[misc]  # likewise
    """The worker's life; LitServe would call it again when it returns."""

    def run(self, lit_api: ClassifierAPI, *_unused: Any) -> None:
        lit_api.worker.run()
        raise SystemExit(0)


class _Status:
    """LitServe writes here what becomes of a worker; it lands in the worker's row, and the parent wakes."""

    def __init__(self, options: WorkerOptions, index: int) -> None:
        self.options, self.index = options, index

    def __setitem__(self, name: str, status: str) -> None:
        state = ProcessState.READY if status == WorkerSetupStatus.READY else ProcessState.DEAD
        self.options.memory.workers["state"][self.index] = state
        self.options.parent_pipe.send([self.index])


class _IdleTransport(MessageTransport):  # type: ignore[misc]  # likewise
    """LitServe wants a way to send answers; ours are the slots and pipes."""

    def send(self, item: Any, consumer_id: int) -> None:
        raise NotImplementedError

    async def areceive(self, timeout: int | None = None, consumer_id: int | None = None) -> dict[str, Any]:
        raise NotImplementedError


def run_worker(api: ClassifierAPI, index: int, device: str) -> None:
    """The whole life of a worker process."""
    options = api.options
    follow_parent(options.parent)
    configure_logging(options.log_format, options.log_level)
    options.memory.workers["pid"][index] = os.getpid()
    api.index = index
    code = 1
    try:
        inference_worker(api, device, index, None, _IdleTransport(), _Status(options, index), CallbackRunner(), False)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        log.exception("worker %d ends", index)
    os._exit(code)  # at once: taking torch apart can last seconds, and there is nothing left to save
