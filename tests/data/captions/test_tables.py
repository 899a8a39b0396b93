"""People's own data: tables in many spellings, folders with a .txt beside each image, COCO's captions."""

import csv
import gzip
import io
import json

import pytest

from probemb.data.captions.dataset import HELD_OUT
from probemb.data.captions.find import find_captions
from probemb.errors import UserError
from tests.world import save, shade, which

PICTURES = {"one.JPG": 1, "my photos/two é.png": 2, "three.jpeg": 3}
ROWS = [("one.JPG", 'a dog, "Rex"'), ("one.JPG", "second; text"), ("my photos/two é.png", "zwei"), ("three.jpeg", "3")]
EXPECTED = {1: ['a dog, "Rex"', "second; text"], 2: ["zwei"], 3: ["3"]}


def table(names, rows=ROWS, mark=",", end="\n"):
    text = io.StringIO()
    csv.writer(text, delimiter=mark, lineterminator=end).writerows([names] * bool(names) + [list(row) for row in rows])
    return text.getvalue()


OBJECTS = [{"file_name": name, "text": EXPECTED[number]} for name, number in PICTURES.items()]
TABLES = {
    "open_clip's": ("x.csv", table(["filepath", "title"])),
    "tabs": ("x.tsv", table(["id", "Image ", " CAPTION"], [(7, *r) for r in ROWS], "\t")),
    "with a byte order mark": ("x.csv", "\ufeff" + table(["image", "caption"], mark=";")),
    "no suffixes": ("results.txt", table(["image_name", "comment"], [(a.rpartition(".")[0], b) for a, b in ROWS], "|")),
    "without a header": ("x.csv", table(None)),
    "Flickr8k.token.txt": ("x.token.txt", table(None, [(f"{a}#{i}", b) for i, (a, b) in enumerate(ROWS)], "\t")),
    "Windows": ("x.csv", table(["path", "text"], [(a.replace("/", "\\"), b) for a, b in ROWS], end="\r\n")),
    "names in another case": ("x.csv", table(["path", "text"]).replace("one.JPG", "One.jpg")),
    "paths through parent folders": ("x.csv", table(["path", "text"], [(f"../data/images/{a}", b) for a, b in ROWS])),
    "URLs": ("x.csv", table(["url", "caption"], [(f"https://h/x/{a}?y#z", b) for a, b in ROWS])),
    "JSON lines": ("metadata.jsonl", "\n".join(map(json.dumps, OBJECTS))),
    "JSON list": ("x.json", json.dumps(OBJECTS)),
    "gzipped": ("x.csv.gz", gzip.compress(table(["file", "caption"]).encode())),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """data/images, and two.png also where an address' file name is looked for."""
    for name, number in PICTURES.items():
        save(tmp_path / "data" / "images" / name, shade(number))
    save(tmp_path / "data" / "images" / "two é.png", shade(2))
    return tmp_path / "data"


def read(data, *more, **options):
    found = find_captions(data, *more, **options)
    return {which(found.images.open(i)): found.captions[i] for i in range(len(found))}


@pytest.mark.parametrize("name", TABLES)
def test_spellings(name, folder):
    file = save(folder / TABLES[name][0], TABLES[name][1])
    assert read(file) == EXPECTED
    if file.suffix in (".csv", ".tsv", ".jsonl"):
        assert read(folder) == EXPECTED
    assert read(file, None, folder / "images") == EXPECTED


def test_absolute_paths_lie_in_the_folder_of_the_images(folder):
    rows = [(folder / "images" / a, b) for a, b in ROWS]
    file = save(folder.parent / "elsewhere" / "x.csv", table(["image", "text"], rows))
    with pytest.raises(UserError, match=r"one.JPG lies outside of .*elsewhere. Name the folder .* with --images"):
        find_captions(file)
    assert read(file, None, folder / "images") == read(file, None, folder.parent) == EXPECTED


def test_captions_beside_images_and_what_is_left_out(folder):
    images = folder / "images"
    (images / "up").symlink_to(folder)  # a loop
    (folder / "images").rename(folder.parent / "elsewhere")
    images.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(UserError, match=r"holds no image with a caption .*Put the captions of x.jpg into x.txt"):
        find_captions(images)
    assert len(find_captions(images, need_caption=False)) == 4
    for name, number in PICTURES.items():
        save((images / name).with_suffix(".txt"), "\n\n".join(EXPECTED[number]))
    save(images / "a.gif", b"")
    save(images / "latin.jpg", shade(9))
    save(images / "latin.txt", b"caf\xe9")
    assert read(images) == EXPECTED
    bad = dict(find_captions(images).images.bad)
    assert bad.keys() == {"a.gif", "latin.jpg", "two é.png"}
    assert bad["a.gif"] == "it is no JPEG, PNG or WebP"
    assert "byte 3 is of another encoding" in bad["latin.jpg"]
    file = save(folder / "x.csv", table(["image", "text"], [*ROWS, ("lost.jpg", "x"), ("latin.jpg", " ")]))
    assert read(file) == EXPECTED
    assert find_captions(file).images.bad == [("lost.jpg", "there is no such file"), ("latin.jpg", "it has no caption")]
    save(file, table(["image", "text"], [("lost.jpg", "x")]))
    assert find_captions(file).flat() == ["x"]
    with pytest.raises(UserError, match=r"1 of the 1 images of .* are missing in .*: lost.jpg is one"):
        _ = find_captions(file).images


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("file,words\na.jpg,x\n", "no column of images, or none of captions"),
        ("", "no column of images"),
        ("x" * 200_000, "field larger than field limit"),
        ("caption,image\nx,one.JPG,y\n", "in row 1, it has more fields than the first line"),
        ('image,caption\n"one.JPG,x\n', "in row 1, unexpected end of data"),
        ('{"image": "one.JPG", "caption": 3}', "in row 1, a caption is not a text"),
        ('{"image": "one.JPG", "caption": "x"}\n{', "in line 2"),
        ("image,caption,split\none.JPG,x,train\none.JPG,y,test\n", "one.JPG in two splits"),
    ],
)
def test_tables_that_are_refused(text, why, folder):
    with pytest.raises(UserError, match=why):
        find_captions(save(folder / "x.csv", text))
    unquoted = save(folder / "y.csv", "image,caption\none.JPG,red, green, blue\n")  # the last column may go on
    assert read(unquoted) == {1: ["red, green, blue"]}


def test_splits_are_a_column_a_file_or_a_folder_or_drawn(tmp_path):
    parts = {"train": range(8), "val": range(8, 10), "test": range(10, 12)}
    rows = [(f"{i}.png", "x", part) for part, some in parts.items() for i in some]
    for name, _, part in rows:
        for place in (name, f"folders/{part}/{name}"):
            save(tmp_path / place, shade(int(name[:-4])))
        save(tmp_path / "folders" / part / f"{name[:-4]}.txt", "x")
        save(tmp_path / "files" / name, shade(int(name[:-4])))
    for part in parts:
        own = [row[:2] for row in rows if row[2] == part]
        save(tmp_path / "files" / f"my_{part}.csv", table(["image", "text"], own))
    column = save(tmp_path / "x.csv", table(["image", "text", "split"], rows))
    for data in (column, tmp_path / "files", tmp_path / "folders"):
        for part, some in parts.items():
            assert sorted(read(data, part, held_out=HELD_OUT)) == list(some)
    plain = save(tmp_path / "y.csv", table(["image", "text"], [(f"{i % 12}.png", f"{i}") for i in range(48)]))
    with pytest.raises(UserError, match="has no split 'train', none at all"):
        find_captions(plain, "train")
    val, train = (read(plain, part, held_out=0.25) for part in ("val", "train"))
    assert len(val) == 3
    assert val.keys() | train.keys() == set(range(12))
    assert not val.keys() & train.keys()
    assert len(read(plain, "train", held_out=0.0)) == 12


def test_cocos_own_captions(tmp_path):
    images = [{"id": i, "file_name": f"{i:012d}.jpg"} for i in (9, 4, 7)]
    rows = [{"id": 10 + i, "image_id": one, "caption": f" {i} "} for i, one in enumerate((4, 9, 4))]
    for one in (4, 9):
        save(tmp_path / "val2017" / f"{one:012d}.jpg", shade(one))
    file = save(tmp_path / "annotations" / "captions_val2017.json", {"images": images, "annotations": rows})
    found = find_captions(file)
    assert (found.image_ids, found.captions, found.caption_ids) == ([9, 4], [["1"], ["0", "2"]], [[11], [10, 12]])
    assert read(file, None, tmp_path / "val2017") == {4: ["0", "2"], 9: ["1"]}
