"""Prompts: texts that describe a class, from templates such as "a photo of a {}." or written for each class."""

from collections.abc import Sequence

SINGLE_TEMPLATE = "a photo of a {}."
Templates = Sequence[str] | dict[str, list[str]]  # for all classes, or the prompts of each class by its name


def imagenet_templates() -> list[str]:
    """CLIP's 80 ImageNet templates, each with one `{}` for the class name."""
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    return [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]


def prompt_texts(class_names: Sequence[str], templates: Templates) -> list[str]:
    """All C x P texts, the prompts of one class next to each other."""
    if isinstance(templates, dict):
        return [prompt for name in class_names for prompt in templates[name]]
    return [template.replace("{}", name) for name in class_names for template in templates]


def count_prompts(templates: Templates) -> int:
    """P, the number of prompts of a class."""
    return len(next(iter(templates.values())) if isinstance(templates, dict) else templates)
