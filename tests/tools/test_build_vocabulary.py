"""tools.build_vocabulary: from shards and caption files, with clear errors."""

import pytest

from probemb.data.scenes import draw_captions, scene
from probemb.data.words import count_words, frequent_words, read_vocabulary
from probemb.errors import UserError
from tools.build_vocabulary import main
from tools.make_scenes import main as make_scenes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("words") / "scenes"
    sizes = ["--train", "30", "--val", "10", "--classes-images", "64", "--shard-size", "16"]
    make_scenes([str(out), *sizes, "--size", "16", "--workers", "1"])
    return out


def test_from_shards(scenes, tmp_path, capsys):
    out = tmp_path / "v.txt"
    assert main([str(scenes / "train"), "--out", str(out), "--min-count", "2"]) == 0
    captions = [caption.text for i in range(30) for caption in draw_captions(scene("0 train", i))]
    counts = count_words(captions)
    assert out.read_text() == "".join(f"{word}\t{count}\n" for word, count in frequent_words(counts, 2))
    assert f"of {len(counts)} words of 150 captions" in capsys.readouterr().out


def test_split_of_a_set_equals_its_folder(scenes, tmp_path):
    main([str(scenes), "--split", "val", "--out", str(tmp_path / "a.txt"), "--max-words", "5", "--min-count", "1"])
    main([str(scenes / "val"), "--out", str(tmp_path / "b.txt"), "--max-words", "5", "--min-count", "1"])
    assert read_vocabulary(tmp_path / "a.txt") == read_vocabulary(tmp_path / "b.txt")
    assert len(read_vocabulary(tmp_path / "a.txt")) == 5


def test_caption_files_are_added_up(tmp_path):
    for name, text in (("a_caps.txt", "a dog\n" * 5), ("b_caps.txt", "a cat\n" * 5)):
        (tmp_path / name).write_text(text)
    out = tmp_path / "v.txt"
    main([str(tmp_path / "a_caps.txt"), str(tmp_path / "b_caps.txt"), "--out", str(out)])
    assert out.read_text() == "a\t10\ncat\t5\ndog\t5\n"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--min-count", "0"], "min-count is 0"),
        (["--max-words", "0"], "max-words is 0"),
        (["--min-count", "99999"], "None of"),
    ],
)
def test_numbers_that_leave_nothing(scenes, tmp_path, extra, message):
    with pytest.raises(UserError, match=message):
        main([str(scenes / "train"), "--out", str(tmp_path / "v.txt"), *extra])


def test_paths_without_captions(scenes, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        main([str(tmp_path / "nothing"), "--out", str(tmp_path / "v.txt")])
    with pytest.raises(UserError, match="no captions"):
        main([str(scenes / "classes"), "--out", str(tmp_path / "v.txt")])
    assert not (tmp_path / "v.txt").exists()
