"""A peer: the same model behind plain FastAPI, with ONNX Runtime in float32: the usual advice for serving quickly on a CPU.

Nothing of Spyglass is imported. The model is exported once, into the file that `--onnx` names; the server then needs no torch. PIL and
numpy do what torchvision's Resize, CenterCrop, ToTensor and Normalize would. A plain `def` endpoint, which FastAPI runs in its thread
pool; several uvicorn workers where asked; OMP_NUM_THREADS is taken as the number of threads of a forward.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, UploadFile
from PIL import Image
from safetensors import safe_open


def export(checkpoint: str, onnx: str) -> None:
    """Writes the model, softmax included, for batches of one. Runs in a process of its own, so that torch is gone afterwards."""
    import torch

    from benchmarks.fastapi_torch import build

    model, header = build(checkpoint)
    crop = header["preprocessing"]["crop"]
    served = torch.nn.Sequential(model, torch.nn.Softmax(dim=1)).eval()
    torch.onnx.export(served, (torch.zeros(1, 3, crop, crop),), onnx, dynamo=False, input_names=["pixels"], output_names=["probabilities"])


def create_app() -> FastAPI:
    """What each uvicorn worker calls; the files' paths come in the environment, for a worker is given nothing else."""
    with safe_open(os.environ["CHECKPOINT"], framework="numpy") as file:
        header = json.loads(file.metadata()["spyglass"])
    labels, steps = header["labels"], header["preprocessing"]
    resize, crop, resample = steps["resize"], steps["crop"], Image.Resampling[steps["interpolation"].upper()]
    mean, std = np.array(steps["mean"], np.float32), np.array(steps["std"], np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # 0: all cores
    session = onnxruntime.InferenceSession(os.environ["ONNX"], options, providers=["CPUExecutionProvider"])
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/predict")
    def predict(content: UploadFile) -> dict[str, Any]:
        image = Image.open(content.file).convert("RGB")
        shorter = min(image.size)
        image = image.resize((resize * image.width // shorter, resize * image.height // shorter), resample)
        left, top = round((image.width - crop) / 2), round((image.height - crop) / 2)
        pixels = np.asarray(image.crop((left, top, left + crop, top + crop)), np.float32) / 255
        pixels = ((pixels - mean) / std).transpose(2, 0, 1)[None]
        (probabilities,) = session.run(None, {"pixels": pixels})[0]
        best = np.argsort(probabilities)[::-1][:5]
        return {"predictions": [{"label": labels[i], "index": int(i), "probability": float(probabilities[i])} for i in best]}

    return app


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--onnx", required=True, help="file of the exported model; made if it is not there")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if not os.path.exists(options.onnx):
        code = "import sys; from benchmarks.fastapi_onnx import export; export(*sys.argv[1:])"
        subprocess.run([sys.executable, "-c", code, options.checkpoint, options.onnx], check=True)
    os.environ["CHECKPOINT"], os.environ["ONNX"] = options.checkpoint, options.onnx
    uvicorn.run(
        "benchmarks.fastapi_onnx:create_app",
        factory=True,
        port=options.port,
        workers=options.workers,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
