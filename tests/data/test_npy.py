"""Array files that are hostile or damaged: always a ValueError."""

import pytest

from probemb.data.reading import read_npy

MAGIC = b"\x93NUMPY\x01\x00"


def with_header(text: bytes) -> bytes:
    return MAGIC + len(text).to_bytes(2, "little") + text


FILES = {
    "nothing": b"",
    "cut off": MAGIC + b"\xff\xff",
    "deep brackets": with_header(b"(" * 9000),
    "a call": with_header(b"__import__('os').getcwd()".ljust(60)),
    "a type of nothing": with_header(b"{'descr': (), 'fortran_order': False, 'shape': (1,)}"),
    "more numbers than there are": with_header(b"{'descr': '<u8', 'fortran_order': False, 'shape': (2**70, 4)}"),
    "Python objects": with_header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_hostile_file_is_refused(name, mapped, tmp_path):
    (tmp_path / "x.npy").write_bytes(FILES[name])
    with pytest.raises(ValueError, match=r"."):
        read_npy(tmp_path / "x.npy", mapped=mapped)
