"""Losses for captions that do not match their images, or match several: NCR, DECL, P2RM and DAA."""
