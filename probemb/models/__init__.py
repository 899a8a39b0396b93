"""Models: create, save, load; what prepares their input; which parameters decay."""

from probemb.models.create import create_model, fill_word_vectors, vocabulary_for
from probemb.models.digest import digest_model, weights_sha256
from probemb.models.dual_encoder import DualEncoder, ModelOutput, no_weight_decay
from probemb.models.encoder import POINT_LOG_VAR, Encoded, Encoder
from probemb.models.ensemble import Ensemble, as_one, networks_of
from probemb.models.formats.published import import_pcmepp, import_prolip
from probemb.models.hub import LoadedModel, lasting_name, load_model, push_to_hub, save_model
from probemb.models.inputs import (
    Augmentation,
    Transforms,
    check_images,
    check_single_embeddings,
    check_words,
    create_tokenizer,
    create_transforms,
)
from probemb.models.towers.parts import draw_parts

__all__ = [
    "POINT_LOG_VAR",
    "Augmentation",
    "DualEncoder",
    "Encoded",
    "Encoder",
    "Ensemble",
    "LoadedModel",
    "ModelOutput",
    "Transforms",
    "as_one",
    "check_images",
    "check_single_embeddings",
    "check_words",
    "create_model",
    "create_tokenizer",
    "create_transforms",
    "digest_model",
    "draw_parts",
    "fill_word_vectors",
    "import_pcmepp",
    "import_prolip",
    "lasting_name",
    "load_model",
    "networks_of",
    "no_weight_decay",
    "push_to_hub",
    "save_model",
    "vocabulary_for",
    "weights_sha256",
]
