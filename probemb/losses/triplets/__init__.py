"""Losses with margins over triplets: VSE++ and order embeddings, their probabilistic form, PVSE and SCAN."""
