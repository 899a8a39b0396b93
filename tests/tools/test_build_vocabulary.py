"""tools.build_vocabulary: from shards and caption files, with clear errors."""

from probemb.data.words import count_words, frequent_words
from tools.build_vocabulary import main
from tools.make_scenes.captions import draw_captions
from tools.make_scenes.world import scene


def test_from_shards(scenes, tmp_path, capsys):
    out = tmp_path / "v.txt"
    assert main([str(scenes / "train"), "--out", str(out), "--min-count", "2"]) == 0
    captions = [caption.text for i in range(64) for caption in draw_captions(scene("0 train", i))]
    counts = count_words(captions)
    assert out.read_text() == "".join(f"{word}\t{count}\n" for word, count in frequent_words(counts, 2))
    assert f"of {len(counts)} words of 320 captions" in capsys.readouterr().out


def test_caption_files_are_added_up(tmp_path):
    for name, text in (("a_caps.txt", "a dog\n" * 5), ("b_caps.txt", "a cat\n" * 5)):
        (tmp_path / name).write_text(text)
    out = tmp_path / "v.txt"
    main([str(tmp_path / "a_caps.txt"), str(tmp_path / "b_caps.txt"), "--out", str(out)])
    assert out.read_text() == "a\t10\ncat\t5\ndog\t5\n"
