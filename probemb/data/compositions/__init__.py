"""Composed retrieval: images, the concepts that each has, and combinations of concepts to ask for (MPC, §4.1)."""

from probemb.data.compositions.annotated import ConceptImages as ConceptImages
from probemb.data.compositions.crops import CroppedImages as CroppedImages
from probemb.data.compositions.dataset import Compositions as Compositions
from probemb.data.compositions.dataset import Example as Example
from probemb.data.compositions.find import find_compositions as find_compositions
from probemb.data.compositions.queries import Part as Part
from probemb.data.compositions.queries import Query as Query
from probemb.data.compositions.queries import QueryParts as QueryParts
from probemb.data.compositions.queries import query_parts as query_parts
from probemb.data.compositions.tuples import TupleNumbers as TupleNumbers
from probemb.data.compositions.tuples import sample_tuples as sample_tuples
