"""Learning rates and locks by the place of a parameter in its tower: shared by pretraining and finetuning."""

from __future__ import annotations

from probemb.errors import UserError
from probemb.models.dual_encoder import DualEncoder


def layer_rates(model: DualEncoder, decay: float, stem: bool = True) -> dict[str, float]:
    """Multipliers of the learning rate of every parameter: decay^depth, of a block k (0 … L - 1) decay^(L - k).

    What lies behind the blocks (last norm, projection), heads, the composer and scalars have 1.

    Args:
        stem: what lies before the blocks (embeddings, first convolution) has decay^(L + 1); else 1, as in PCME++'s
            public code.
    """
    places = {name: model.place(name) for name, _ in model.named_parameters()}
    n_blocks = {"image": 0, "text": 0}
    for name, (tower, part, depth) in places.items():
        if part == "trunk" and not model.in_stem(name):
            n_blocks[tower] = max(n_blocks[tower], depth)
    rates = {}
    for name, (tower, _, depth) in places.items():
        if model.in_stem(name):
            depth = n_blocks[tower] + 1 if stem else 0
        rates[name] = decay**depth
    return rates


def freeze_backbones(
    model: DualEncoder, image: bool, text: bool = False, image_groups: int = 0, text_groups: int = 0
) -> bool:
    """Freeze or thaw the image tower, and the text tower, without what starts from random weights.

    Frozen batch norms keep their stored statistics (`Encoder.use_batch_statistics`).

    Args:
        image, text: whether the tower's pretrained part (`Encoder.is_pretrained`) is frozen from now on.
        image_groups, text_groups: last groups that are trained nevertheless: what lies behind the blocks (the last
            norm, the projection), then the last block, the one before it, and so on.

    Returns:
        whether anything has changed; then DDP must wrap the model again, as it reads `requires_grad` once.
    """
    changed = False
    for name, parameter in model.named_parameters():
        if (tower := model.pretrained_tower(name)) is None:
            continue
        depth = model.place(name)[2]
        groups = image_groups if tower == "image" else text_groups
        unlocked = depth < groups and not model.in_stem(name)
        frozen = (image if tower == "image" else text) and not unlocked
        if parameter.requires_grad == frozen:
            parameter.requires_grad_(not frozen)
            parameter.grad = None
            changed = True
    return changed


def check_frozen(
    model: DualEncoder, image: bool, text: bool = False, image_groups: int = 0, text_groups: int = 0
) -> None:
    """Refuse locks that leave a tower as it is, or nothing but scalars to train.

    Args:
        image, text, image_groups, text_groups: as given to `freeze_backbones`.

    Raises:
        UserError: more unlocked groups than the tower has, a tower without anything that could be locked, or nothing
            to train.
    """
    for tower, locked, groups in (("image", image, image_groups), ("text", text, text_groups)):
        names = [name for name, _ in model.named_parameters() if model.pretrained_tower(name) == tower]
        available = 1 + max((model.place(name)[2] for name in names if not model.in_stem(name)), default=-1)
        if locked and groups > available:
            remedy = f"Set it to a number from 0 to {available}." if available else "Leave it out."
            raise UserError(
                f"model.unlocked_{tower}_groups is {groups}, and the pretrained weights of the {tower} tower have "
                f"{available} groups.",
                remedy,
            )
        if locked and not any(not model.get_parameter(name).requires_grad for name in names):
            raise UserError(
                f"model.lock_{tower} locks nothing of the {tower} tower.",
                f"Lower model.unlocked_{tower}_groups, or leave lock_{tower} out.",
            )
    if not any(p.requires_grad for name, p in model.named_parameters() if model.place(name)[0] != "neither"):
        raise UserError(
            "Both towers are locked, and nothing of them would be trained.",
            "Unlock one of them, or set model.unlocked_image_groups or model.unlocked_text_groups.",
        )
