"""Zero-shot classification with prompts filtered by their uncertainty; `zeroshot.imagenet` is the command."""
