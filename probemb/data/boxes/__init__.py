"""Images with phrases and the boxes they refer to."""

from probemb.data.boxes.geometry import grid_windows as grid_windows
from probemb.data.boxes.geometry import iou as iou
from probemb.data.boxes.phrases import CropTriplet as CropTriplet
from probemb.data.boxes.phrases import Phrase as Phrase
from probemb.data.boxes.phrases import PhraseDataset as PhraseDataset
from probemb.data.boxes.phrases import crop_triplets as crop_triplets
from probemb.data.boxes.phrases import find_phrases as find_phrases
