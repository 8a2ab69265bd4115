"""python -m service [serve] | predict"""

from __future__ import annotations

import logging
import os
import signal
import sys


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["predict"]:
        from service import client

        return client.main(arguments[1:])
    return _serve(arguments[1:] if arguments[:1] == ["serve"] else arguments)


def _serve(arguments: list[str]) -> int:
    from service.settings import SettingsError, configure_logging, read, unknown_variables

    try:
        settings = read(arguments)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    configure_logging(settings.log_format, settings.log_level)
    for variable in unknown_variables():
        logging.warning("%s in the environment is no setting; python -m service --help lists them", variable)

    from models.checkpoint import CheckpointError
    from service.machine import StartError
    from service.server import SpyglassServer

    try:
        return SpyglassServer(settings).run()
    except (CheckpointError, StartError, OSError) as error:  # OSError: out of memory or descriptors
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, which nobody here needs: a process that forks has one
    predicting = sys.argv[1:2] == ["predict"]
    # Process 1 of a container gets no signal that it has not asked for, and the server asks only once it is there.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143) if predicting else sys.exit(0))
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # before the server, or the client, has taken over
        code = 130
    if predicting:
        os._exit(code)  # threads that still wait for answers would keep the process
    sys.exit(code)
