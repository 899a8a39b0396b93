"""Finetuning on captioned images: one recipe, loop and evaluation for PCME++ and the methods it is compared with."""
