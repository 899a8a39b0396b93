"""Learning rates and locks by the place of a parameter in its tower: shared by pretraining and finetuning."""

from __future__ import annotations

from probemb.errors import UserError
from probemb.models.dual_encoder import DualEncoder


def layer_rates(model: DualEncoder, decay: float, stem: bool = True) -> dict[str, float]:
    """Multipliers of the learning rate of every parameter: decay^depth, of a block k (0 … L - 1) decay^(L - k).

    What lies behind the blocks (last norm, projection), heads, the composer and scalars have 1. With `stem`, what lies
    before them (embeddings, first convolution) has decay^(L + 1); else 1, as in PCME++'s public code.
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
    """Freeze or thaw each tower's pretrained part (`Encoder.is_pretrained`); frozen batch norms keep their statistics.

    Args:
        image_groups, text_groups: last groups that are trained nevertheless: what lies behind the blocks (the last
            norm, the projection), then the last block, the one before it, and so on.

    Returns:
        whether anything has changed; then DDP must wrap the model again, as it reads `requires_grad` once.
    """
    changed, locks = False, {"image": (image, image_groups), "text": (text, text_groups)}
    for name, parameter in model.named_parameters():
        locked, groups = locks.get(model.pretrained_tower(name), (None, 0))
        if locked is None:
            continue
        frozen = locked and (model.place(name)[2] >= groups or model.in_stem(name))
        if parameter.requires_grad == frozen:
            parameter.requires_grad_(not frozen)
            parameter.grad = None
            changed = True
    return changed


def check_frozen(
    model: DualEncoder, image: bool, text: bool = False, image_groups: int = 0, text_groups: int = 0
) -> None:
    """Raise UserError for locks, as given to `freeze_backbones`, that leave a tower as it is, or nothing to train."""
    for tower, locked, groups in (("image", image, image_groups), ("text", text, text_groups)):
        names = [name for name, _ in model.named_parameters() if model.pretrained_tower(name) == tower]
        available = 1 + max((model.place(name)[2] for name in names if not model.in_stem(name)), default=-1)
        if locked and (groups > available or all(model.get_parameter(name).requires_grad for name in names)):
            raise UserError(
                f"model.lock_{tower} with model.unlocked_{tower}_groups {groups} locks nothing: the pretrained weights "
                f"of the {tower} tower have {available} groups.",
                f"Lower model.unlocked_{tower}_groups, or leave lock_{tower} out.",
            )
    if not any(p.requires_grad for name, p in model.named_parameters() if model.place(name)[0] != "neither"):
        raise UserError(
            "Both towers are locked, and nothing of them would be trained.",
            "Unlock one of them, or set model.unlocked_image_groups or model.unlocked_text_groups.",
        )
