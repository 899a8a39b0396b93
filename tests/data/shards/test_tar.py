"""The tar walker against Python's tarfile, and against files made to mislead it."""

import random
import tarfile

import pytest

from probemb.data.failures import BadShard
from probemb.data.shards.samples import walk_tar
from tests.world import write_tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def reference(path):
    with tarfile.open(path) as tar:
        return [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]


def members(path):
    return [tuple(member) for member in walk_tar(path)]


def header(name=b"a.jpg", size=b"00000000005\0", kind=b"0", magic=b"ustar\x0000", checksum=None):
    """One 512-byte header, with a fitting checksum unless another is given."""
    fields = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size.ljust(12, b"\0") + b"00000000000\0"
    block = bytearray((fields + b" " * 8 + kind + b"\0" * 100 + magic).ljust(512, b"\0"))
    block[148:156] = checksum if checksum is not None else b"%06o\0 " % sum(block)
    return bytes(block)


def write(tmp_path, data):
    path = tmp_path / "made.tar"
    path.write_bytes(data)
    return path


END = b"\0" * 1024


@pytest.mark.parametrize("format", FORMATS)
def test_equals_tarfile(tmp_path, format):
    draw = random.Random(0)
    names = ["a.jpg", "folder/b.jpg", "é/ü.json", "x" * 98 + ".t"]
    names += [f"{'d' * 90}/{'e' * 60}/{i}.jpg" for i in range(3)]  # a ustar prefix, or an extended header
    if format != "ustar":
        names += ["long/" * 60 + "ö" * 100 + ".jpg", "y" * 300]
    files = [(name, draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000]))) for name in names]
    path = write_tar(tmp_path / "a.tar", files, FORMATS[format])
    found = members(path)
    assert found == reference(path)
    assert [name for name, _, _ in found] == names
    data = path.read_bytes()
    assert [data[offset : offset + size] for _, offset, size in found] == [content for _, content in files]


def test_base_256_size(tmp_path):
    path = write(tmp_path, header(size=b"\x80" + (5).to_bytes(11, "big")) + b"12345".ljust(512, b"\0") + END)
    assert members(path) == [("a.jpg", 512, 5)] == reference(path)


HOSTILE = {
    "empty": (b"", "empty"),
    "text": (b"hello world\n" * 100, "not an uncompressed tar"),
    "gzip": (b"\x1f\x8b\x08" + bytes(range(256)) * 8, "not an uncompressed tar"),
    "cut inside a member": (header() + b"123", "cut off"),
    "cut between members": (header() + b"12345".ljust(512, b"\0"), "cut off"),
    "size beyond the file": (header(size=b"77777777777\0") + END, "cut off"),
    "negative size": (header(size=b"\xff" * 12) + END, "damaged"),
    "wrong checksum": (header() + b"5".ljust(512, b"\0") + header(checksum=b"000000\0 ") + END, "no header"),
    "sparse": (header(kind=b"S") + b"".ljust(512, b"\0") + END, "damaged"),
    "pax size": (
        header(kind=b"x", size=b"00000000013\0") + b"11 size=-5\n".ljust(512, b"\0") + header() + END, "damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_the_reason(tmp_path, case):
    data, reason = HOSTILE[case]
    path = write(tmp_path, data)
    with pytest.raises(BadShard, match=reason) as refused:
        members(path)
    assert str(path) in str(refused.value)


@pytest.mark.chaos
def test_data_after_the_end_marker_is_damage(tmp_path):
    files = [(f"{i}.jpg", b"5" * 3000) for i in range(40)]
    path = write_tar(tmp_path / "a.tar", files)
    data, whole = path.read_bytes(), members(path)
    middle = whole[20][1] - 512  # a header
    for name, damaged in {
        "zeros": data[:middle] + bytes(4096) + data[middle + 4096 :],
        "joined": data + data,
        "one byte": data[:-1] + b"x",
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(BadShard, match="data follows"):
            members(path)
        with open(path, "rb") as file:
            found = [tuple(member) for member in walk_tar(file, salvage=True)]
        if name == "zeros":
            assert found == whole[:20] + whole[22:]  # the two members under the zeros are lost
        elif name == "joined":
            assert found == whole + [(one, offset + len(data), size) for one, offset, size in whole]
        else:
            assert found == whole
    path.write_bytes(data + bytes(3 << 20))
    assert members(path) == whole
