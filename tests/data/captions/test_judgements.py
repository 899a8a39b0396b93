"""Files of judgements: both formats, the rows that they name, and broken files."""

import gzip

import pytest

from probemb.data.captions.dataset import CaptionDataset
from probemb.data.captions.judgements import read_judgements
from probemb.errors import UserError

HEADER = "image\tcaption_image\tcaption_index\tyes\tno\n"


def dataset(names=("a", "b", "c")):
    captions = [[f"{name} {k}" for k in range(n)] for name, n in zip(names, (2, 3, 1))]
    return CaptionDataset(captions=captions, image_ids=list(names), source="data", split="test")


def read(tmp_path, text, data=None):
    file = tmp_path / "judgements"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_judgements(file, data or dataset())


def test_both_formats_name_the_same_rows(tmp_path):
    table = HEADER + "a\tb\t2\t1\t2\nb\tb\t0\t3\t0\nc\ta\t1\t0\t4\n"
    crowd = "a.jpg\tb.jpg#2\t0.333333333333\t1\t2\nb.jpg\tb.jpg#0\t1\t3\t0\nc.jpg\ta.jpg#1\t0\t0\t4\n"
    for text in (table, crowd, gzip.compress(table.encode()), crowd.replace("\n", "\r\n"), "\ufeff" + table):
        found = read(tmp_path, text)
        assert found.image.tolist() == [0, 1, 2]
        assert found.caption.tolist() == [4, 2, 1]  # a has rows 0 and 1, b 2 to 4, c 5
        assert found.own.tolist() == [False, True, False]
        assert (found.yes.tolist(), found.no.tolist()) == ([1, 3, 0], [2, 0, 4])
        assert found.accepted.tolist() == [False, True, False]
        assert found.share.tolist() == pytest.approx([1 / 3, 1, 0])
        assert found.names == ["a", "b", "c"]
        assert found.unknown == 0


def test_pairs_that_the_data_does_not_hold_are_counted(tmp_path):
    text = HEADER + "a\tb\t0\t1\t2\nz\tb\t0\t1\t2\na\tz\t0\t1\t2\na\tc\t1\t1\t2\n"
    found = read(tmp_path, text)
    assert (len(found), found.unknown) == (1, 3)
    with pytest.raises(UserError, match=r"None of the 1 judged pairs of .* is in data \(test\). Name the data"):
        read(tmp_path, HEADER + "z\tb\t0\t1\t2\n")
    with pytest.raises(UserError, match="several images of the name a"):
        read(tmp_path, text, dataset(("x/a", "y/a", "b")))


def test_grades_of_experts_are_no_votes(tmp_path):
    with pytest.raises(UserError, match="in line 2, '1' is not the share of 1 yes and 1 no"):
        read(tmp_path, "a.jpg\tb.jpg#0\t0.5\t1\t1\na.jpg\tb.jpg#1\t1\t1\t1\n")
