"""The drawn world of the study, and the image trunk of all its trainings: a classifier of pictures and of objects.

The paper's ResNet comes from ImageNet's labels; this trunk learns from those of the training pictures. Half of a batch
are whole pictures with all of their concepts, half crops with one. What follows has it frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from probemb.cli.progress import progress
from probemb.data.compositions.dataset import Compositions
from probemb.data.image_loader import cropped
from probemb.data.randomness import stream_of
from probemb.files import replace_file
from probemb.models import DualEncoder, create_transforms
from tools.claims.study import Tell


def draw_scenes(settings, out: Path, tell: Tell) -> Path:
    """Draw what is not there yet; returns the folder of the pictures. Raises UserError: something else lies there."""
    from tools.make_scenes import Plan, make

    tell(f"scenes in {out}")
    plan = Plan(train=0, val=0, classes_images=0, size=settings.pixels, compositions=settings.images)
    make(plan, out, workers=2)
    return out / "compositions"


def fill_trunk(model: DualEncoder, data: Compositions, settings, file: Path, tell: Tell) -> None:
    """Give the model's image tower the trunk that `file` holds, or train it and write the file."""
    tower = model.image_tower
    if not file.is_file():
        tell(f"the image trunk learns from {settings.pictures:,} pictures and as many crops: {file}")
        train_trunk(model, data, settings)
        held = {name: x for name, x in tower.state_dict().items() if tower.place(name).part == "trunk"}
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, lambda aside: save_file(held, aside))
    tower.load_state_dict(load_file(file), strict=False)


def train_trunk(model: DualEncoder, data: Compositions, settings) -> list[float]:
    """Cross entropy of every concept, present or not; returns the loss of every step."""
    torch.manual_seed(0)
    tower = model.image_tower
    trunk = [x for name, x in tower.named_parameters() if tower.place(name).part == "trunk"]
    head = nn.Linear(tower.pooled_width, len(data.concepts))
    nn.init.constant_(head.bias, -3.0)  # few concepts are in a picture
    steps, losses = max(1, settings.pictures // settings.trunk_batch), []
    optimizer = torch.optim.Adam([*trunk, *head.parameters()], settings.trunk_lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - step / steps))
    with progress("the image trunk", steps) as advance:
        for pixels, labels in batches(model, data, settings.trunk_batch, steps):
            features, _ = tower.features(pixels)
            loss = F.binary_cross_entropy_with_logits(head(features.pooled), labels, reduction="sum") / len(labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            advance(1)
    return losses


def batches(model: DualEncoder, data: Compositions, half: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`half` pictures and one crop of each, (2 half, 3, H, W), and their concepts (2 half, C) of 0 and 1."""
    transform = create_transforms(model).evaluate
    owners = [(crop.image, concept, crop.box) for concept, crops in enumerate(data.crops) for crop in crops]
    of_image: dict[int, list] = {}
    for image, concept, box in owners:
        of_image.setdefault(image, []).append((concept, box))
    usable = np.array(sorted(of_image))
    order = np.concatenate(
        [stream_of("trunk", epoch).permutation(usable) for epoch in range(-(-half * steps // len(usable)))]
    )
    for step in range(steps):
        pixels, labels = [], torch.zeros(2 * half, len(data.concepts))
        random = stream_of("trunk", "crop", step)
        for row, image in enumerate(order[step * half : (step + 1) * half].tolist()):
            picture, choices = data.images.open(image), of_image[image]
            concept, box = choices[random.randint(len(choices))]
            pixels += [transform(picture), transform(cropped(picture, box))]
            labels[2 * row, sorted(data.holds[image])] = 1
            labels[2 * row + 1, concept] = 1
        pixels = torch.stack(pixels)
        yield pixels, labels[: len(pixels)]
