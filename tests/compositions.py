"""Images that hold concepts, made here."""

import numpy as np

from probemb.data.compositions.dataset import Compositions
from probemb.data.image_loader import Images, Place


def made(held, concepts, cut=None, files=None, tuples=(), splits=None) -> Compositions:
    """Image i holds the concepts held[i], in the boxes cut[i]; each lies in a file of its own, if in any."""
    places = [Place(f"image {i}", str(files[i]) if files else "none") for i in range(len(held))]
    return Compositions(
        images=Images(places=places, source="made"),
        names=[place.name for place in places],
        splits=splits or ["train"] * len(held),
        concepts=tuple(f"concept {c}" for c in range(concepts)),
        held=[sorted(mine) for mine in held],
        cut=cut or [None] * len(held),
        tuples=np.array(tuples),
        source="made",
    )
