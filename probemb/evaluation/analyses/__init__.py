"""Analyses of embeddings: set algebra, unions of crops, phrase localisation, ellipses in a plane."""
