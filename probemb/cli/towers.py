"""The towers of a model, as options of the trainers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from jsonargparse.typing import NonNegativeInt

from probemb.cli.ranges import Dimensions, Share

if TYPE_CHECKING:
    from probemb.models import DualEncoder


@dataclass(frozen=True)
class Towers:
    """The towers (see probemb.models.create_model).

    Args:
        name: one of open_clip's models, or one of the project's own (probemb/models/configs).
        pretrained: an open_clip tag, a file or folder of open_clip weights, or a run of `pretrain`; empty for random
            weights.
        head: clip (the tower's own pooling), gpo (pooling over tokens), pie (and attention), mlp or average.
        embed_dim: D; empty for the configuration's own (heads clip, mlp and average) or 1024 (gpo and pie).
        n_unc_layers: blocks of every tower that are duplicated into its uncertainty branch; [2, 1] for 2 of the image
            tower and 1 of the text tower; empty for 1, and 0 where a method has none. Of a branch alone.
        uncertainty: what the variance is read from: branch (PCME++), token (an uncertainty token beside the class
            token, ProLIP) or prolip-code (for ProLIP's published weights).
        vocabulary: of a model that reads words; empty for the pretrained run's, or vocabulary.txt in the folder of the
            training data or above.
        word_vectors: a file in GloVe's text format that such a model's words start from; empty to leave them.
        image_weights: of an image tower from timm: "timm" for its default weights, another tag, or a file.
        crop_pct: share of an image's shorter side that evaluation's centre crop keeps: 0.875 for 224 of 256 pixels;
            empty for the pretrained run's, or 1.
        lock_image: freeze the image tower's trunk; its heads train.
        batch_norm: statistics that batch norms normalise by in training: batch (of all ranks), frozen (the stored ones)
            or auto: batch in a tower that starts from random weights, frozen in a pretrained or locked one.
    """

    name: str = "ViT-B-16"
    pretrained: str | None = None
    head: str = "clip"
    embed_dim: Dimensions | None = None
    n_unc_layers: NonNegativeInt | tuple[NonNegativeInt, NonNegativeInt] | None = None
    uncertainty: Literal["branch", "token", "prolip-code"] = "branch"
    vocabulary: str | None = None
    word_vectors: str | None = None
    image_weights: str | None = None
    crop_pct: Share | None = None
    lock_image: bool = False
    batch_norm: Literal["auto", "batch", "frozen"] = "auto"

    DEFAULT_LAYERS: ClassVar[int | None] = None  # of a branch, if not create_model's own default

    @property
    def origin(self) -> str:
        """Description of the weights that the towers start from."""
        if self.image_weights:
            return f"image weights {self.image_weights}, texts from random weights"
        return self.pretrained or "random weights"

    def create(
        self,
        data: Iterable[str],
        loss=None,
        texts: Iterable[str] | None = None,
        probabilistic: bool = True,
        **more,
    ) -> DualEncoder:
        """The model, on the CPU; the same on every rank.

        Args:
            data: paths of the training data, beside which a vocabulary may lie.
            texts: whose words are the vocabulary, if none is named, instead of a file's beside the data.
            loss: options of the objective, whose `scale` and `shift`, if any, are the model's initial ones.
            probabilistic: False for a point model; more: further options of `create_model`.
        """
        from probemb.models import create_model, vocabulary_for

        layers = self.n_unc_layers
        if layers is None and probabilistic:
            layers = self.DEFAULT_LAYERS
        return create_model(
            self.name,
            embed_dim=self.embed_dim,
            n_unc_layers=layers if self.uncertainty == "branch" else None,
            uncertainty=self.uncertainty,
            probabilistic=probabilistic,
            head=self.head,
            pretrained=self.pretrained,
            image_weights=self.image_weights,
            crop_pct=self.crop_pct,
            batch_norm="frozen" if self.lock_image and self.batch_norm == "auto" else self.batch_norm,
            init_scale=getattr(loss, "scale", 1.0),
            init_shift=getattr(loss, "shift", 1.0),
            vocabulary=vocabulary_for(self.name, self.vocabulary, self.pretrained, data, texts),
            **more,
        )
