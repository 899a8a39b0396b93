"""Composed retrieval: images, the concepts that each has, and combinations of concepts to ask for (MPC, §4.1)."""

from probemb.data.compositions.concepts import ConceptImages as ConceptImages
from probemb.data.compositions.concepts import Crop as Crop
from probemb.data.compositions.concepts import CroppedImages as CroppedImages
from probemb.data.compositions.concepts import Crops as Crops
from probemb.data.compositions.concepts import Holdings as Holdings
from probemb.data.compositions.dataset import KINDS as KINDS
from probemb.data.compositions.dataset import Compositions as Compositions
from probemb.data.compositions.dataset import Example as Example
from probemb.data.compositions.dataset import Part as Part
from probemb.data.compositions.dataset import Query as Query
from probemb.data.compositions.dataset import QueryParts as QueryParts
from probemb.data.compositions.dataset import query_parts as query_parts
from probemb.data.compositions.find import find_compositions as find_compositions
from probemb.data.compositions.tuples import MAX_K as MAX_K
from probemb.data.compositions.tuples import sample_tuples as sample_tuples
