"""Flickr30k Entities in its published layout, and what is refused of it."""

import pytest

from probemb.data.boxes import find_phrases
from probemb.errors import UserError
from tests.world import picture, save

SENTENCES = {
    "36979": [
        "[/EN#1/people A group of friends] playing [/EN#2/other cards] in [/EN#3/scene a room] .",
        "[/EN#1/people Some people] with [/EN#4/clothing/bodyparts red hats] and [/EN#0/notvisual fun] .",
    ],
    "65567": ["[/EN#7/people A man] alone ."],
    "81641": ["[/EN#9/animals Two dogs] run ."],
}
BOX = "<object>{names}<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


def placed(*corners, names=("1",)):
    return BOX.format(*corners, names="".join(f"<name>{name}</name>" for name in names))


OBJECTS = {
    "36979": placed(1, 1, 10, 20, names=("1", "4"))
    + placed(31, 5, 40, 30, names=("1",))
    + placed(5, 6, 7, 8, names=("2",))
    + "<object><name>3</name><scene>1</scene><nobndbox>1</nobndbox></object>",
    "65567": placed(1, 1, 60, 40, names=("7",)),
    "81641": placed(2, 2, 90, 70, names=("9",)),  # beyond the image
}


def annotation(objects, width=60, height=40):
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>x.jpg</filename>{size}{objects}</annotation>"


@pytest.fixture
def entities(tmp_path):
    """As the archive unpacks, with images and lists of splits beside it."""
    root = tmp_path / "flickr30k_entities"
    for one, lines in SENTENCES.items():
        save(root / "Sentences" / f"{one}.txt", "\n".join(lines) + "\n")
        save(root / "Annotations" / f"{one}.xml", annotation(OBJECTS[one]))
        save(root / "flickr30k-images" / f"{one}.jpg", picture((200, 10, 10), (60, 40), "JPEG"))
    (root / "test.txt").write_text("36979\n81641\n")
    (root / "val.txt").write_text("65567\n")
    (root / "train.txt").write_text("")
    return root


def test_phrases_with_their_boxes(entities):
    found = find_phrases(entities, "test")
    assert found.image_ids == ["36979", "81641"]
    assert found.sizes == [(60, 40), (60, 40)]
    group = ((0, 0, 10, 20), (30, 4, 40, 30))
    assert [(p.image, p.text, p.kind, p.boxes) for p in found.phrases] == [
        (0, "A group of friends", "people", group),
        (0, "cards", "other", ((4, 5, 7, 8),)),
        (0, "Some people", "people", group),
        (0, "red hats", "clothing/bodyparts", ((0, 0, 10, 20),)),
        (1, "Two dogs", "animals", ((1, 1, 60, 40),)),
    ]
    assert found.without_box == 2  # the scene, and what cannot be seen
    assert found.images.open(1).size == (60, 40)


LAUGHS = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;">]>'
OUTSIDE = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("entities_of", [LAUGHS, OUTSIDE])
def test_document_types_are_refused(entities, entities_of):
    (entities / "Annotations" / "36979.xml").write_text(entities_of + annotation("<object><name>&b;</name></object>"))
    with pytest.raises(UserError, match=r"36979.xml is not .* document type"):
        find_phrases(entities, "test")
