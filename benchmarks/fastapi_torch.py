"""A peer: the same model behind plain FastAPI, with torch in float32, as its tutorials and torch's have it.

Nothing of Spyglass is imported. Inference mode; a plain `def` endpoint, which FastAPI runs in its thread pool; several uvicorn workers
where asked; OMP_NUM_THREADS, which torch reads, says how many threads a forward takes.
"""

import argparse
import json
import os
from typing import Any

import timm
import torch
import torchvision
import uvicorn
from fastapi import FastAPI, UploadFile
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torchvision import transforms


def build(checkpoint: str) -> tuple[torch.nn.Module, Any]:
    """The model in eval mode, and what the checkpoint says of its labels and preprocessing."""
    with safe_open(checkpoint, framework="pt") as file:
        header = json.loads(file.metadata()["spyglass"])
    name, classes = header["architecture"], len(header["labels"])
    if name.startswith("timm:"):
        model = timm.create_model(name.removeprefix("timm:"), num_classes=classes)
    else:
        model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    tensors = load_file(checkpoint)
    model.load_state_dict({key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")})
    return model.eval(), header


def create_app() -> FastAPI:
    """What each uvicorn worker calls; the checkpoint's path comes in the environment, for a worker is given nothing else."""
    model, header = build(os.environ["CHECKPOINT"])
    labels, steps = header["labels"], header["preprocessing"]
    transform = transforms.Compose(
        [
            transforms.Resize(steps["resize"], interpolation=transforms.InterpolationMode(steps["interpolation"])),
            transforms.CenterCrop(steps["crop"]),
            transforms.ToTensor(),
            transforms.Normalize(steps["mean"], steps["std"]),
        ]
    )
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/predict")
    def predict(content: UploadFile) -> dict[str, Any]:
        image = Image.open(content.file).convert("RGB")
        with torch.inference_mode():
            probabilities = model(transform(image).unsqueeze(0)).softmax(dim=1)[0]
        best = probabilities.topk(min(5, len(labels)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {"predictions": [{"label": labels[index], "index": index, "probability": value} for index, value in found]}

    return app


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    os.environ["CHECKPOINT"] = options.checkpoint
    uvicorn.run(
        "benchmarks.fastapi_torch:create_app",
        factory=True,
        port=options.port,
        workers=options.workers,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
