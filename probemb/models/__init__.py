"""Models: create, save, load; what prepares their input; which parameters decay. Names are loaded on first use."""

from importlib import import_module

_HOME = {
    "adapter": "last_layer last_projection",
    "create": "create_model fill_word_vectors vocabulary_for",
    "dual_encoder": "DualEncoder ModelOutput no_weight_decay",
    "encoder": "POINT_LOG_VAR Encoded Encoder draw_parts",
    "formats": "export_open_clip import_pcmepp import_prolip",
    "hub": "save_model",
    "inputs": "Tokenizer Transforms check_images check_single_embeddings check_words create_tokenizer create_transforms"
    " unknown_words",
    "load": "LoadedModel lasting_name load_model weights_sha256",
    "match": "Ensemble MatchModel as_one networks_of",
    "options": "Augmentation ModelOptions TrainedTowers",
}
_MODULES = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'probemb.models' has no attribute {name!r}")
    return getattr(import_module(f"probemb.models.{_MODULES[name]}"), name)
