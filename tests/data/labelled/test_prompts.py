"""Prompts and ImageNet's class names."""

from probemb.data.labelled.classes import imagenet_classes
from probemb.data.labelled.prompts import SINGLE_TEMPLATE, imagenet_templates


def test_the_openai_prompts_are_80_and_hold_the_single_one():
    templates = imagenet_templates()
    assert len(templates) == len(set(templates)) == 80
    assert SINGLE_TEMPLATE in templates
    assert all(t.count("{}") == 1 for t in templates)
    assert len(imagenet_classes()) == 1000
