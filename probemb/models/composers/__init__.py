"""Composers: from the k embeddings of a query to one. `product` is MPC's; the others are its rivals."""

from __future__ import annotations

from probemb.errors import UserError, nearest
from probemb.models.composers.addition import AdditionComposer
from probemb.models.composers.composer import Composer
from probemb.models.composers.film import FiLMComposer
from probemb.models.composers.mlp import MLPComposer
from probemb.models.composers.mrn import MRNComposer
from probemb.models.composers.product import ProductComposer
from probemb.models.composers.relationship import RelationshipComposer
from probemb.models.composers.tirg import TIRGComposer

COMPOSERS: dict[str, type[Composer]] = {
    "product": ProductComposer,
    "addition": AdditionComposer,
    "mlp": MLPComposer,
    "relationship": RelationshipComposer,
    "film": FiLMComposer,
    "mrn": MRNComposer,
    "tirg": TIRGComposer,
}
ALIASES = {"mpc": "product", "pcme-addition": "addition"}  # the methods that are named after their composer

__all__ = ["ALIASES", "COMPOSERS", "Composer", "create_composer"]


def create_composer(name: str, dim: int) -> Composer:
    """A composer of embeddings of `dim` dimensions, with random weights where it has any.

    Raises:
        UserError: an unknown name.
    """
    known = [*COMPOSERS, *ALIASES]
    if name not in known:
        raise UserError(f"There is no composer '{name}'.{nearest(name, known)}", f"Choose one of {', '.join(known)}.")
    return COMPOSERS[ALIASES.get(name, name)](dim)
