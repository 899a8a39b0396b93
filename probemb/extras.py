"""Packages of the optional installs: which extra has each."""

from importlib import import_module

from probemb.errors import UserError

EXTRAS = {
    "accelerate": "train",
    "deepspeed": "train",
    "tensorboard": "train",
    "img2dataset": "data",
    "pandas": "data",
    "faiss": "search",
    "flask": "search",
    "waitress": "search",
    "submitit": "slurm",
    "transformers": "hf",
    "wandb": "wandb",
    "s3fs": "s3",
}


def not_installed(error: ModuleNotFoundError) -> UserError | None:
    """The UserError for a missing package of an extra; None for another module."""
    name = (error.name or "").partition(".")[0]
    remedy = f"pip install 'probemb[{EXTRAS.get(name)}]', or 'probemb[all]' for every command."
    return UserError(f"This needs the package {name}, which is not installed.", remedy) if name in EXTRAS else None


class Extra:
    """A module of an extra, imported at its first use. Its attributes raise UserError where it is not installed."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        try:
            return getattr(import_module(self._name), attribute)
        except ModuleNotFoundError as error:
            raise not_installed(error) or error from None
