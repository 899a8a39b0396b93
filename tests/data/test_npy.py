"""Array files that are hostile or damaged: always a ValueError."""

import io

import numpy as np
import pytest

from probemb.data.npy import npy_header, read_npy

MAGIC = b"\x93NUMPY\x01\x00"


def with_header(text: bytes) -> bytes:
    return MAGIC + len(text).to_bytes(2, "little") + text


def of_shape(shape, descr="<u8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


HEADERS = {
    "nothing": b"",
    "cut off": MAGIC + b"\xff\xff",
    "deep brackets": with_header(b"(" * 9000),
    "a call": with_header(b"__import__('os').getcwd()".ljust(60)),
    "a type of nothing": with_header(b"{'descr': (), 'fortran_order': False, 'shape': (1,)}"),
}
FILES = HEADERS | {
    "more numbers than there are": of_shape((2**70, 4)),
    "Python objects": of_shape((1,), "|O"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_hostile_file_is_refused(name, mapped, tmp_path):
    (tmp_path / "x.npy").write_bytes(FILES[name])
    with pytest.raises(ValueError, match=r"."):
        read_npy(tmp_path / "x.npy", mapped=mapped)
    if name in HEADERS:
        with open(tmp_path / "x.npy", "rb") as file, pytest.raises(ValueError, match=r"."):
            npy_header(file)


def test_an_array_is_read_in_memory_and_mapped(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(2, 3))
    for mapped in (False, True):
        assert read_npy(tmp_path / "x.npy", mapped=mapped).tolist() == [[0, 1, 2], [3, 4, 5]]
    with open(tmp_path / "x.npy", "rb") as file:
        assert npy_header(file) == ((2, 3), False, np.dtype("<f8"))
