"""The LitServer: makes the memory, starts workers and front doors, watches them all, drains, stops.

LitServe's part: the server class and its life cycle, the naming of devices, the API and loop classes, and the entry point of
each worker process. Ours: the app and its routes, the processes, and all that passes between them; where LitServe would use a
manager process and queues, workers and front doors share memory and wake each other by pipes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import litserve
import uvicorn
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from models import checkpoint
from service.app import assemble
from service.connection import Connection
from service.frontdoor import FrontDoor
from service.intake import Intake
from service.loop import ClassifierAPI, follow_parent, run_worker
from service.machine import StartError, available_cpus, find_devices, give_large_back, share, share_heap
from service.settings import Settings, configure_logging
from service.slots import STOP, Failure, Layout, Memory, ProcessState, SlotState, WakePipe
from service.worker import WorkerOptions

log = logging.getLogger(__name__)

START_LIMIT_S = 600.0  # a large model on a slow disk takes its time; a worker that hangs must not hang the start for ever
_BACKLOG = 2048
_API_VERSION = "1.1"
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def _check_certificate(settings: Settings) -> None:
    """A certificate that can't be used must not be found out only after the model is loaded. Raises StartError."""
    if settings.ssl_certfile:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")  # never ask a terminal
        except OSError as error:  # SSLError is one
            files = f"{settings.ssl_certfile} and {settings.ssl_keyfile}: {error}"
            raise StartError(f"ssl_certfile, ssl_keyfile: {files}; needed are a certificate chain and its key, not encrypted") from None


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """For the start of children, who unblock what they ignore: a Ctrl-C in a terminal reaches the whole process group."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it listens, and is stopped by the parent's word only."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_listening = on_listening
        self.stop = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_listening()

    async def main_loop(self) -> None:
        # uvicorn's own looks ten times a second whether it should exit. A tick of 0 sets the Date header; it changes every second.
        while not self.stop.is_set():
            await self.on_tick(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), 1.0)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SpyglassServer(litserve.LitServer):  # type: ignore[misc]  # LitServe carries no types
    """LitServe with processes, hand-over and routes of our own; LitServe's manager, queues and monitor stay off."""

    def __init__(self, settings: Settings) -> None:
        """Read what is needed to know that serving is possible. Raises CheckpointError and StartError."""
        self.settings = settings
        self.header = checkpoint.read_header(settings.checkpoint)
        _check_certificate(settings)
        device_names = find_devices(settings.device)
        cuda = device_names != ["cpu"]
        self.places = [device for _ in range(settings.workers_per_device) for device in device_names]

        cores = share(available_cpus(), len(self.places), None if settings.api_servers == "auto" else int(settings.api_servers))
        doors = cores.api_servers
        self.decode_threads = cores.decode_threads if settings.decode_threads == "auto" else int(settings.decode_threads)
        # On a GPU a quarter of them, which is what large requests may have, keeps both lanes busy.
        enough = max(128, (8 if cuda else 4) * settings.max_batch_size * len(self.places))
        in_flight = int(settings.slots) if settings.slots != "auto" else enough
        self.layout = Layout(
            slots=-(-max(in_flight, doors) // doors) * doors,
            crop=self.header.preprocessing.crop,
            classes=len(self.header.labels),
            workers=len(self.places),
            doors=doors,
        )
        self.memory = Memory(self.layout)
        self.worker_pipes = [WakePipe() for _ in self.places]
        self.door_pipes = [WakePipe() for _ in range(doors)]
        self.parent_pipe = WakePipe()  # its numbers mean nothing: they wake the parent, which looks at the tables
        options = WorkerOptions(
            memory=self.memory,
            pipes=self.worker_pipes,
            door_pipes=self.door_pipes,
            parent_pipe=self.parent_pipe,
            parent=os.getpid(),
            checkpoint=settings.checkpoint,
            header=self.header,
            engine=settings.engine,
            precision=settings.precision,
            compiled=settings.compile == "on",
            cache_dir=settings.cache_dir,
            max_batch_size=settings.max_batch_size,
            batch_wait_s=settings.batch_wait_ms / 1000,
            threads=cores.model_threads,
            log_format=settings.log_format,
            log_level=settings.log_level,
        )
        super().__init__(
            ClassifierAPI(options),
            accelerator="cuda" if cuda else "cpu",
            devices=[int(name.partition(":")[2]) for name in device_names] if cuda else 1,
            workers_per_device=settings.workers_per_device,
            timeout=False,
        )
        # In LitServe's place: its app comes with routes before the key, gzip, and documentation from a foreign host.
        self.app = FastAPIOffline(title="Spyglass", version=_API_VERSION, redoc_url=None, redirect_slashes=False, lifespan=self.lifespan)
        self.asgi = assemble(self.app, settings, self.header)
        self.workers: list[BaseProcess] = []
        self.doors: list[BaseProcess] = []

    def register_endpoints(self) -> None:
        """LitServe would put /predict, /, /health and /info here; ours are in routes.py."""

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The life of one front door's event loop."""
        self.front_door.start(self.uvicorn.stop.set)
        yield
        self.front_door.close()

    def _listening(self) -> None:
        self.memory.doors["state"][self.front_door.index] = ProcessState.READY
        self.parent_pipe.send([self.front_door.index])

    def run(self) -> int:
        """Serve until a signal says stop or a process dies. Returns the exit code. Raises StartError."""
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the number arrives in the pipe
        self.signal_pipe = wake_reader

        # Bound before the model loads, so that a busy port is known at once; listening only once there is a model to answer.
        with self._bind() as listener:
            try:
                self._start_workers(listener)
                if not self._wait(lambda: bool((self.memory.workers["state"] == ProcessState.READY).all())):
                    return 0
                self._listen(listener)
                self._start_doors(listener)
                if not self._wait(lambda: bool((self.memory.doors["state"] == ProcessState.READY).all())):
                    return 0
                self._greet(listener)
                listener.close()
                return self._watch()
            finally:
                self._end_all()

    def _bind(self) -> socket.socket:
        host, port = self.settings.host, self.settings.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except (OSError, UnicodeError) as error:
            raise self._unusable(error) from None
        return listener

    def _listen(self, listener: socket.socket) -> None:
        try:
            listener.listen(_BACKLOG)  # here, not only in the front doors: another server may have come first while the model loaded
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError | UnicodeError) -> StartError:
        why = error.strerror if isinstance(error, OSError) else error
        return StartError(f"host, port: can't listen on {self.settings.host} port {self.settings.port}: {why}")

    def _start_workers(self, listener: socket.socket) -> None:
        # For torch on a CPU, in the workers: OpenMP teams that wait by spinning take the cores from decoding; without any spin a
        # light model's many small steps each pay for a wake-up.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        log.info("loading %s on %s", self.settings.checkpoint, ", ".join(self.places))
        # Forked: this process has one thread and has touched neither torch nor a device, so its children begin with all that is imported.
        # Which their garbage collectors leave alone: looking at it would copy the memory that all of them share.
        gc.collect()
        gc.freeze()
        context = multiprocessing.get_context("fork")
        with _signals_blocked():
            for index, device in enumerate(self.places):
                self.memory.workers["generation"][index] = 1
                process = context.Process(target=self._run_worker, args=(index, device, listener), name=f"worker-{index}")
                process.start()
                self.workers.append(process)

    def _run_worker(self, index: int, device: str, listener: socket.socket) -> None:
        listener.close()  # a worker that outlived its parent must not keep the port
        run_worker(self.lit_api, index, device)

    def _start_doors(self, listener: socket.socket) -> None:
        context = multiprocessing.get_context("fork")
        with _signals_blocked():
            for index in range(self.layout.doors):
                process = context.Process(target=self._run_door, args=(index, listener, os.getpid()), name=f"door-{index}")
                process.start()
                self.doors.append(process)

    def _run_door(self, index: int, listener: socket.socket, parent: int) -> None:
        """The whole life of a front-door process."""
        follow_parent(parent)
        configure_logging(self.settings.log_format, self.settings.log_level)
        self.memory.doors["pid"][index] = os.getpid()
        share_heap()
        give_large_back()
        self.front_door = FrontDoor(self.memory, index, self.worker_pipes, self.door_pipes[index], self.decode_threads)
        self.app.state.intake = Intake(self.settings, self.header, self.front_door)
        config = uvicorn.Config(
            self.asgi,
            proxy_headers=False,  # nothing here asks where a request came from
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(self.settings.drain_s),
            backlog=_BACKLOG,
            ws="none",
            ssl_certfile=self.settings.ssl_certfile,
            ssl_keyfile=self.settings.ssl_keyfile,
        )
        self.uvicorn = _Uvicorn(config, self._listening)
        self.uvicorn.run(sockets=[listener])

    def _wait(self, done: Callable[[], bool]) -> bool:
        """Wait until all are ready. False when a signal came first. Raises StartError when one died or time ran out."""
        limit = time.monotonic() + START_LIMIT_S
        while not done():
            processes = [*self.workers, *self.doors]
            wait([self.signal_pipe, self.parent_pipe.reader, *(process.sentinel for process in processes)], limit - time.monotonic())
            self.parent_pipe.receive()
            if wait([self.signal_pipe], 0):
                return False
            for process in processes:
                if process.exitcode is not None:
                    raise StartError(f"{process.name} died before it was ready: {self._reason(process)}")
            if time.monotonic() > limit:
                raise StartError(f"not ready after {START_LIMIT_S:.0f} s")
        return True

    def _reason(self, process: BaseProcess) -> str:
        if process in self.workers:
            reason = self.memory.workers["reason"][self.workers.index(process)].decode(errors="replace")
            if reason:
                return str(reason)
        code = process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _greet(self, listener: socket.socket) -> None:
        scheme = "https" if self.settings.ssl_certfile else "http"
        host = "localhost" if self.settings.host in ("0.0.0.0", "::", "127.0.0.1") else self.settings.host
        url = f"{scheme}://{host}:{listener.getsockname()[1]}"
        for row in self.memory.workers:
            log.info("%s: %s", row["device"].decode(), row["why"].decode(errors="replace"))
        workers = f"{len(self.places)} worker{'s' if len(self.places) > 1 else ''} on {', '.join(dict.fromkeys(self.places))}"
        log.info("serving %s (version %s), %s, at %s", self.header.name, self.header.version, workers, url)
        if not self.settings.keys and self.settings.host not in ("127.0.0.1", "::1", "localhost"):
            log.info("listening on %s: whoever reaches this port may ask, no key is needed (host, api_keys)", self.settings.host)
        example = Path("examples/coffee.jpg")
        key = " -H 'X-API-Key: KEY'" if self.settings.keys else ""
        trusted = f" --cacert {self.settings.ssl_certfile}" if self.settings.ssl_certfile else ""
        log.info("try: curl%s%s --data-binary @%s %s/predict", trusted, key, example if example.exists() else "photograph.jpg", url)

    def _watch(self) -> int:
        """Wait for a signal (0) or for the death of a process (1)."""
        while True:
            processes = [*self.workers, *self.doors]
            wait([self.signal_pipe, *(process.sentinel for process in processes)])
            dead = [process for process in processes if process.exitcode is not None]
            for process in dead:
                log.error("%s died (%s): the server stops", process.name, self._reason(process))
            if dead:
                return 1
            if wait([self.signal_pipe], 0):
                log.info("stopping: %s", signal.Signals(os.read(self.signal_pipe, 1)[0]).name)
                return 0

    def _fail_slots_of_dead_workers(self) -> None:
        for index, process in enumerate(self.workers):
            if process.exitcode is not None:
                self.memory.workers["state"][index] = ProcessState.DEAD
                state = self.memory.state
                lost = [
                    slot
                    for slot in range(self.layout.slots)
                    if self.memory.worker[slot] == index and state[slot] in (SlotState.WAITING, SlotState.TAKEN)
                ]
                self.memory.failure[lost] = Failure.WORKER_DIED
                state[lost] = SlotState.FAILED
                for slot in lost:
                    self.door_pipes[self.layout.owner(slot)].send([slot])

    def _end_all(self) -> None:
        """Front doors first, which answer what they accepted; then the workers, whom nobody needs any more."""
        self.memory.server["draining"][0] = 1
        self._fail_slots_of_dead_workers()
        for pipes, processes, limit in ((self.door_pipes, self.doors, self.settings.drain_s + 2), (self.worker_pipes, self.workers, 2.0)):
            for pipe in pipes:
                pipe.send([STOP])
            end = time.monotonic() + limit
            for process in processes:
                process.join(max(0.0, end - time.monotonic()) if self._hears(process) else 0)
                if process.exitcode is None:
                    if self._hears(process):
                        log.warning("%s did not end in time and is killed", process.name)
                    process.kill()
                    process.join()
        log.info("stopped")

    def _hears(self, process: BaseProcess) -> bool:
        """Whether it reads its pipe: a worker does not while it still loads its model, and holds nothing yet either."""
        return process in self.doors or bool(self.memory.workers["state"][self.workers.index(process)] == ProcessState.READY)
