"""Prompts: texts that name a class, from templates such as "a photo of a {}."."""

from collections.abc import Sequence

SINGLE_TEMPLATE = "a photo of a {}."


def imagenet_templates() -> list[str]:
    """CLIP's 80 ImageNet templates, each with one `{}` for the class name."""
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    return [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]


def prompt_texts(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """All C x P texts, the prompts of one class next to each other."""
    return [template.replace("{}", name) for name in class_names for template in templates]
