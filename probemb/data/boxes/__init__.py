"""Images with phrases and the boxes that these mean: Flickr30k Entities and Visual Genome, found by their content."""

from probemb.data.boxes.find import find_phrases as find_phrases
from probemb.data.boxes.geometry import grid_windows as grid_windows
from probemb.data.boxes.geometry import iou as iou
from probemb.data.boxes.phrases import Phrase as Phrase
from probemb.data.boxes.phrases import PhraseDataset as PhraseDataset
from probemb.data.boxes.visual_genome import crop_triplets as crop_triplets
