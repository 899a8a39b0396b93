"""The tar walker against Python's tarfile, and against files made to mislead it."""

import io
import os
import random
import tarfile

import pytest

from probemb.data.failures import BadShard
from probemb.data.shards.tar import salvage_tar, walk_tar

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
def test_equals_tarfile(write_tar, format):
    draw = random.Random(0)
    names = ["a.jpg", "folder/b.jpg", "é/ü.json", "x" * 98 + ".t"]
    names += [f"{'d' * 90}/{'e' * 60}/{i}.jpg" for i in range(3)]  # a ustar prefix, or an extended header
    if format != "ustar":
        names += ["long/" * 60 + "ö" * 100 + ".jpg", "y" * 300]
    files = [(name, draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000]))) for name in names]
    path = write_tar("a.tar", files, FORMATS[format])
    found = members(path)
    assert found == reference(path)
    assert [name for name, _, _ in found] == names
    data = path.read_bytes()
    assert [data[offset : offset + size] for _, offset, size in found] == [content for _, content in files]


def test_an_open_file_keeps_its_position(write_tar):
    path = write_tar("a.tar", [("a.jpg", b"12345")])
    with open(path, "rb") as file:
        file.seek(7)
        assert [tuple(member) for member in walk_tar(file)] == members(path)
        assert file.tell() == 7


def test_pax_size_and_global_headers_count(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all"}) as tar:
        info = tarfile.TarInfo("plain.jpg")
        info.size, info.pax_headers = 5, {"path": "told/by/pax.jpg", "size": "5"}
        tar.addfile(info, io.BytesIO(b"12345"))
        tar.addfile(tarfile.TarInfo("next.jpg"))
    assert members(path) == reference(path)
    assert [name for name, _, _ in members(path)] == ["told/by/pax.jpg", "next.jpg"]


def test_pax_size_overrides_the_header(tmp_path):
    record = b"9 size=7\n"
    data = header(b"x", b"%011o\0" % len(record), b"x") + record.ljust(512, b"\0")
    data += header(size=b"00000000000\0") + b"1234567".ljust(512, b"\0") + END
    path = write(tmp_path, data)
    assert members(path) == [("a.jpg", 1536, 7)]


def test_base_256_size(tmp_path):
    path = write(tmp_path, header(size=b"\x80" + (5).to_bytes(11, "big")) + b"12345".ljust(512, b"\0") + END)
    assert members(path) == [("a.jpg", 512, 5)] == reference(path)


def test_folders_links_and_devices_are_passed_over(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(f"kind{kind.decode()}")
            info.type, info.linkname = kind, "elsewhere" * 20
            tar.addfile(info)
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    assert members(path) == reference(path)
    assert len(members(path)) == 1


HOSTILE = {
    "empty": (b"", "empty"),
    "text": (b"hello world\n" * 100, "not a tar"),
    "short": (b"hello", "not a tar"),
    "zip": (b"PK\x03\x04" + bytes(range(256)) * 8, "not a tar"),
    "gzip": (b"\x1f\x8b\x08" + bytes(range(256)) * 8, "compressed"),
    "cut inside a member": (header() + b"123", "cut off"),
    "cut between members": (header() + b"12345".ljust(512, b"\0"), "cut off"),
    "size beyond the file": (header(size=b"77777777777\0") + END, "more bytes"),
    "size of 2**80": (header(size=b"\x80\0" + b"\xff" * 10) + END, "more bytes"),
    "negative size": (header(size=b"\xff" * 12) + END, "no valid size"),
    "size not a number": (header(size=b"0x10\0") + END, "no valid size"),
    "wrong checksum": (header() + b"5".ljust(512, b"\0") + header(checksum=b"000000\0 ") + END, "damaged"),
    "old sparse": (header(kind=b"S") + b"".ljust(512, b"\0") + END, "not supported"),
    "several volumes": (header(kind=b"M") + END, "not supported"),
    "link with a size": (header(kind=b"1") + END, "states a size"),
    "long name of 2 MiB": (header(kind=b"L", size=b"%011o\0" % (2 << 20)) + b"a" * (2 << 20) + END, "extended"),
    "long name cut off": (header(kind=b"L", size=b"00000007777\0") + b"a" * 512, "extended"),
    "nothing after a long name": (header(kind=b"L") + b"12345".ljust(512, b"\0") + END, "after an extended"),
}
for number, record in enumerate(
    [b"0 a=b\n", b"999 a=b\n", b"6 a=bc\n", b"-1 a=b\n", b"no record", b"99999999999999999999999 a=b\n", b"5 ab\n"]
):
    HOSTILE[f"pax record {number}"] = (
        header(kind=b"x", size=b"%011o\0" % len(record)) + record.ljust(512, b"\0") + header() + END,
        "malformed pax",
    )
for number, record in enumerate([b"11 size=-5\n", b"11 size=1e\n", b"14 size=" + "٣".encode() * 2 + b"1\n"]):
    HOSTILE[f"pax size {number}"] = (
        header(kind=b"x", size=b"%011o\0" % len(record)) + record.ljust(512, b"\0") + header() + END,
        "no valid size",
    )
SPARSE = b"22 GNU.sparse.major=1\n"
HOSTILE["pax sparse"] = (
    header(kind=b"x", size=b"%011o\0" % len(SPARSE)) + SPARSE.ljust(512, b"\0") + header() + END,
    "sparse",
)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_the_reason(tmp_path, case):
    data, reason = HOSTILE[case]
    path = write(tmp_path, data)
    with pytest.raises(BadShard, match=reason) as refused:
        members(path)
    assert str(path) in str(refused.value)


def test_pipes_and_folders_are_no_shards(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "folder.tar").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(BadShard, match="not a regular file"):
            members(tmp_path / f"{name}.tar")


def test_missing_file(tmp_path):
    with pytest.raises(BadShard, match="cannot be opened"):
        members(tmp_path / "none.tar")


@pytest.mark.chaos
def test_every_cut_of_a_tar_is_noticed(write_tar):
    path = write_tar("a.tar", [("long/" * 40 + "a.jpg", b"x" * 700), ("b.txt", b"y")], tarfile.PAX_FORMAT)
    data = path.read_bytes()
    end = max(offset + size for _, offset, size in members(path))
    for cut in range(0, end, 97):
        path.write_bytes(data[:cut])
        with pytest.raises(BadShard):
            members(path)


def test_flipped_bytes_end_in_a_refusal_or_in_members_inside_the_file(write_tar):
    path = write_tar("a.tar", [("long/" * 40 + "a.jpg", b"x" * 700), ("b.txt", b"y")], tarfile.PAX_FORMAT)
    data = path.read_bytes()[:5120]
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 3])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            assert all(offset + size <= len(changed) for _, offset, size in members(path))
        except BadShard:
            refused += 1
    assert refused > 50


@pytest.mark.chaos
def test_data_after_the_end_marker_is_damage(write_tar, tmp_path):
    files = [(f"{i}.jpg", b"5" * 3000) for i in range(40)]
    path = write_tar("a.tar", files)
    data, whole = path.read_bytes(), members(path)
    middle = whole[20][1] - 512  # a header
    for name, damaged in {
        "zeros": data[:middle] + bytes(4096) + data[middle + 4096 :],
        "joined": data + data,
        "one byte": data[:-1] + b"x",
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(BadShard, match="data follows the end marker"):
            members(path)
        with open(path, "rb") as file:
            found = [tuple(member) for member in salvage_tar(file)]
        if name == "zeros":
            assert found == whole[:20] + whole[22:]  # the two members under the zeros are lost
        elif name == "joined":
            assert found == whole + [(one, offset + len(data), size) for one, offset, size in whole]
        else:
            assert found == whole
    path.write_bytes(data + bytes(3 << 20))
    assert members(path) == whole


def test_what_is_found_of_a_damaged_tar(write_tar):
    path = write_tar("a.tar", [(f"{'long' * 40}{i}.jpg", b"5" * 3000) for i in range(9)], tarfile.PAX_FORMAT)
    data, whole = path.read_bytes(), members(path)
    for damaged, expected in [
        (data[: whole[7][1] + 100], whole[:7]),
        (data[: whole[3][1] - 10] + b"x" + data[whole[3][1] - 9 :], whole[:3] + whole[4:]),
        (b"x" * 512 + data[512:], None),
        (b"", []),
    ]:
        path.write_bytes(damaged)
        with open(path, "rb") as file:
            found = [tuple(member) for member in salvage_tar(file)]
        assert found[1:] == whole[1:] if expected is None else found == expected
