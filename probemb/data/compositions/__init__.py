"""Composed retrieval: images, the concepts that each has, and combinations of concepts to ask for (MPC, §4.1)."""
