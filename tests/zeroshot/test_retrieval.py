"""Retrieval on shards with captions."""

import json

import pytest
import torch

from probemb.data.captions.find import find_captioned
from probemb.data.scenes.scenes import matches
from probemb.errors import UserError
from probemb.evaluation.classification import normalise
from probemb.evaluation.embed_pairs import exact_match
from probemb.gaussian import Gaussian
from tests.world import jpeg, write_tar
from zeroshot.retrieval import main, refuse_too_many_pairs, score


def test_captions_and_scenes_are_found(captioned):
    found = find_captioned(captioned)
    assert len(found.images) == 24
    assert all(len(texts) == 3 for texts in found.captions)
    kept = [0, 5, 7]
    match = exact_match(found, kept)
    told = [caption for i in kept for caption in found.scenes[i][1]]
    for row, i in enumerate(kept):
        assert match[row].tolist() == [matches(caption, found.scenes[i][0]) for caption in told]
        assert match[row, 3 * row : 3 * row + 3].all()


def test_plain_captions_have_no_scenes(tmp_path, pictures):
    members = [("a.jpg", pictures[0][1]), ("a.txt", b"one\ntwo\n"), ("b.jpg", pictures[1][1]), ("b.txt", b"three")]
    found = find_captioned(write_tar(tmp_path / "a.tar", members))
    assert found.captions == [["one", "two"], ["three"]]
    assert found.scenes is None


def test_scores_of_a_perfect_embedding_and_of_uncertain_rivals():
    mean = torch.eye(6)
    owner = torch.arange(6).repeat_interleave(2)
    images = Gaussian(mean, torch.full((6, 6), -5.0))
    texts = Gaussian(mean[owner], torch.full((12, 6), -5.0))
    for row in score(images, texts, owner):
        assert row["rsum"] == pytest.approx(600)
        assert row["i2t"]["map_at_r"] == row["t2i"]["r_precision"] == 1
    wrong = normalise(mean[owner] + 0.9 * mean[(owner + 1) % 6])
    wrong[::2] = mean[owner][::2]
    spread = torch.full((12, 6), -5.0)
    spread[1::2] = 2.0  # the captions that lie between two images say so
    by_csd, by_mean = score(images, Gaussian(wrong, spread), owner)
    assert by_csd["i2t"]["r@1"] == 1
    assert by_csd["t2i"] == by_mean["t2i"]  # a query's own uncertainty is a constant


def test_the_command_writes_both_halves_and_the_ambiguity(run_folder, captioned, tmp_path, capsys):
    assert main(["--model", str(run_folder), "--data", str(captioned), "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "retrieval.json").read_text(), parse_constant=pytest.fail)
    assert [(row["positives"], row["ranking"]) for row in results["rows"]] == [
        ("own captions", "csd"), ("own captions", "mean"), ("all true captions", "csd"), ("all true captions", "mean")
    ]  # fmt: skip
    assert (results["images"], results["captions"]) == (24, 72)
    assert -1 <= results["uncertainty"]["ambiguity_spearman"] <= 1
    assert "true ambiguity: Spearman" in capsys.readouterr().out


def test_unreadable_images_take_their_captions_along(run_folder, tmp_path):
    from probemb.data.scenes.scenes import scene

    members = []
    for i in range(10):
        data = b"no" if i == 4 else jpeg(scene("bad", i))
        members += [(f"{i}.jpg", data), (f"{i}.txt", f"caption {i}\nother {i}".encode())]
    tar = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match="1 of 10 images"):
        main(["--model", str(run_folder), "--data", str(tar), "--out", str(tmp_path / "o")])
    assert not (tmp_path / "o").exists()
    main(["--model", str(run_folder), "--data", str(tar), "--out", str(tmp_path / "o"), "--max-bad", "0.1"])
    results = json.loads((tmp_path / "o" / "retrieval.json").read_text())
    assert (results["images"], results["captions"]) == (9, 18)
    assert [row["name"] for row in results["images_left_out"]] == ["4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--model is missing"),
        ({"--model": "x"}, "--data is missing"),
        ({"--model": "x", "--data": "nowhere"}, "does not exist"),
        ({"--model": "x", "--data": "."}, "holds no webdataset shards"),
        ({"--model": "x", "--data": "labelled"}, "no image with a caption"),
    ],
)
def test_bad_input(options, message, shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {name: str(shards) if value == "labelled" else value for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        main([word for pair in options.items() for word in pair])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--max-bad", "2", "--max-bad is 2.0"),
        ("--workers", "-3", "--workers is -3"),
        ("--batch-size", "0", "--batch-size is 0"),
        ("--device", "meta", "--device meta is not supported"),
    ],
)
def test_numbers_out_of_range_are_refused(run_folder, captioned, tmp_path, option, value, what):
    argv = ["--model", str(run_folder), "--data", str(captioned), "--out", str(tmp_path / "out"), option, value]
    with pytest.raises(UserError, match=what):
        main(argv)
    assert not (tmp_path / "out").exists()


def test_more_pairs_than_fit_into_memory_are_refused():
    refuse_too_many_pairs(20_000, 100_000)
    with pytest.raises(UserError, match="20,000 images and 100,001 captions are 2,000,020,000 pairs"):
        refuse_too_many_pairs(20_000, 100_001)
