"""python -m models pull"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models", description="Makes the checkpoints that `python -m service` serves.")
    commands = parser.add_subparsers(dest="command", required=True)
    pull = commands.add_parser("pull", help="public pretrained weights -> a checkpoint")
    pull.add_argument("name", help="efficientnet_lite0 (needs no network), or any classification architecture of torchvision")
    pull.add_argument("-o", "--out", type=Path, help="the file to write (default: checkpoints/NAME.safetensors)")
    options = parser.parse_args(arguments)
    return _pull(options.name, options.out or Path("checkpoints") / f"{options.name}.safetensors")


def _pull(name: str, path: Path) -> int:
    from models.checkpoint import CheckpointError
    from models.pretrained import PullError, pull  # imports torch: not before the arguments are known to be right

    try:
        header = pull(name, path)
    except (PullError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {header.name}, version {header.version}, {len(header.labels)} labels, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
