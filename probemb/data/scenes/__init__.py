"""The synthetic world, "scenes": drawn images whose captions, matches and classes are known exactly.

A scene has one to three objects with shape, colour, size and place, and camera settings (photo or drawing, light,
focus). Its captions range from exact ("a dark photo of a large red circle left of a small blue square") to vague ("two
shapes"). Each caption has a predicate, from which its matches and its ambiguity, the share of all images that it fits,
are computed exactly: there are no false negatives, and a learned uncertainty can be compared with the true one.
`predicates.py` defines the meaning of words, `world.py` the distribution of scenes.
"""

from probemb.data.scenes.captions import draw_captions as draw_captions
from probemb.data.scenes.drawing import boxes as boxes
from probemb.data.scenes.drawing import render as render
from probemb.data.scenes.predicates import ambiguity as ambiguity
from probemb.data.scenes.predicates import match_matrix as match_matrix
from probemb.data.scenes.predicates import sample_from_json as sample_from_json
from probemb.data.scenes.predicates import sample_to_json as sample_to_json
from probemb.data.scenes.world import Scene as Scene
from probemb.data.scenes.world import class_label as class_label
from probemb.data.scenes.world import class_names as class_names
from probemb.data.scenes.world import class_scene as class_scene
from probemb.data.scenes.world import scene as scene
from probemb.data.scenes.world import scene_of_split as scene_of_split
from probemb.data.scenes.world import sized_class_label as sized_class_label
from probemb.data.scenes.world import sized_class_names as sized_class_names
from probemb.data.scenes.world import unseen_classes as unseen_classes
