"""The peer: the same model behind LitServe, written as its quickstart and its image examples are.

Nothing of Spyglass is imported: this is what somebody writes alone in an hour. It isn't handicapped either: inference
mode, batches of 8, and the device that LitServe itself picks (torch is imported first, so `auto` finds a GPU).
"""

import argparse
import json
from typing import Any

import litserve as ls
import timm
import torch
import torchvision
from fastapi import Request
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torchvision import transforms


class ImageClassifierAPI(ls.LitAPI):  # type: ignore[misc]  # litserve carries no types
    """The four steps of a LitAPI: decode, batch, predict, encode."""

    def __init__(self, checkpoint: str, **batching: Any) -> None:
        super().__init__(**batching)
        self.checkpoint = checkpoint

    def setup(self, device: str) -> None:
        """Loads the weights, labels and preprocessing that the checkpoint carries."""
        with safe_open(self.checkpoint, framework="pt") as file:
            header = json.loads(file.metadata()["spyglass"])
        self.labels: list[str] = header["labels"]

        name: str = header["architecture"]
        if name.startswith("timm:"):
            model = timm.create_model(name.removeprefix("timm:"), num_classes=len(self.labels))
        else:
            model = torchvision.models.get_model(name, weights=None, num_classes=len(self.labels))
        tensors = load_file(self.checkpoint)
        model.load_state_dict({key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")})
        self.model: torch.nn.Module = model.eval().to(device)

        steps = header["preprocessing"]
        self.transform = transforms.Compose(
            [
                transforms.Resize(steps["resize"], interpolation=transforms.InterpolationMode(steps["interpolation"])),
                transforms.CenterCrop(steps["crop"]),
                transforms.ToTensor(),
                transforms.Normalize(steps["mean"], steps["std"]),
            ]
        )

    def decode_request(self, request: Request) -> torch.Tensor:
        """A form with the image file in the field `content`, as LitServe's documentation has it."""
        image = Image.open(request["content"].file).convert("RGB")
        tensor: torch.Tensor = self.transform(image)
        return tensor

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """One tensor of all the images that wait."""
        return torch.stack(inputs)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Probabilities in float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(x.to(self.device))
        return logits.softmax(dim=1).cpu()

    # No annotations, as in the quickstart: LitServe would make FastAPI check every answer against them.
    def encode_response(self, output):  # type: ignore[no-untyped-def]
        """The five best labels: as many as Spyglass answers by default."""
        best = output.topk(min(5, len(self.labels)))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {"predictions": [{"label": self.labels[index], "index": index, "probability": value} for index, value in found]}


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    api = ImageClassifierAPI(options.checkpoint, max_batch_size=8, batch_timeout=0.01)
    server = ls.LitServer(api, workers_per_device=options.workers)
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False)


if __name__ == "__main__":
    main()
