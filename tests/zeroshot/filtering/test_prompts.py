"""Templates, class names, and the cache of prompt embeddings."""

import json

import pytest
import torch

from probemb.data.labelled.classes import read_classes
from probemb.data.labelled.prompts import count_prompts, prompt_texts
from probemb.errors import UserError
from probemb.evaluation.embedding import Embedder
from probemb.models import load_model
from zeroshot.filtering.prompts import embed_prompts, read_templates, single_index

TEXTS = ["a photo of a cat.", "a photo of a dog.", "a bad photo of the red bicycle."]


def test_templates_come_from_clip_or_a_file(tmp_path):
    templates = read_templates(None)
    assert templates[single_index(templates)] == "a photo of a {}."
    file = tmp_path / "t.txt"
    file.write_text("the {}\n\n  a {}. \n")
    assert read_templates(file) == ["the {}", "a {}."]
    assert single_index(["the {}", "a {}."]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("a photo\n", "Line 1"), ("a {}\n{} and {}\n", "Line 2"), ("a {}\na {}\n", "occurs twice")],
)
def test_templates_that_are_none_are_refused(tmp_path, content, message):
    file = tmp_path / "t.txt"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_templates(file)


def test_a_json_file_has_the_prompts_of_every_class(tmp_path):
    file, prompts = tmp_path / "p.json", {"dog": ["a dog", "an animal"], "cat": ["a cat", "a pet"], "more": []}
    file.write_text(json.dumps(prompts))
    templates = read_templates(file, ["cat", "dog"])
    assert prompt_texts(["cat", "dog"], templates) == ["a cat", "a pet", "a dog", "an animal"]
    assert (count_prompts(templates), single_index(templates)) == (2, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no JSON object"),
        ('{"cat": ["a cat"]}', "no prompts for the class 'dog'"),
        ('{"cat": ["a cat"], "dog": ["a dog", "it"]}', "one length"),
        ('{"cat": [], "dog": []}', "one length"),
        ('{"cat": "a cat", "dog": "a dog"}', "one length"),
    ],
)
def test_prompts_that_do_not_fit_the_classes_are_refused(tmp_path, content, message):
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_templates(file, ["cat", "dog"])


def test_class_files_of_every_kind(tmp_path):
    def read(name, content):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        classes = read_classes(tmp_path / name)
        return classes.names, classes.keys

    assert read("a.txt", "tench\nred  fox\n\n") == (("tench", "red  fox"), None)
    assert read("b.json", ["tench", "fox"]) == (("tench", "fox"), None)
    assert read("c.json", {"n1": "tench", "n2": "fox"}) == (("tench", "fox"), ("n1", "n2"))
    rows = [{"index": 1, "wnid": "n2", "open_clip_name": "fox"}, {"index": 0, "wnid": "n1", "open_clip_name": "tench"}]
    assert read("d.json", rows) == (("tench", "fox"), ("n1", "n2"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "is empty"),
        ("a.txt", "cat\n\ndog\n", "Class 1"),
        ("a.json", "{", "not JSON"),
        ("a.json", "3", "no list"),
        ("a.json", '["cat", 4]', "Class 1"),
        ("a.json", '[{"index": 0, "name": "a"}, {"index": 2, "name": "b"}]', "not 0 to 1"),
        ("a.json", '[{"key": "x", "name": "a"}, {"key": "x", "name": "b"}]', "twice"),
    ],
)
def test_class_files_that_are_none_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_classes(tmp_path / name)
    with pytest.raises(UserError, match="does not exist"):
        read_classes(tmp_path / "missing")


@pytest.fixture(scope="module")
def loaded(run_folder):
    return load_model(run_folder)


def embed(loaded, cache, texts=TEXTS, model=None):
    return embed_prompts(Embedder(model or loaded.model, loaded.tokenizer, None), texts, cache)


def test_the_cache_gives_back_what_was_computed(loaded, tmp_path):
    off, first, second = embed(loaded, None), embed(loaded, tmp_path), embed(loaded, tmp_path)
    assert (off.cache, first.cache, second.cache) == ("off", "computed", "read")
    for found in (first, second):
        assert torch.equal(found.gaussian.mean, off.gaussian.mean)
        assert torch.equal(found.gaussian.log_var, off.gaussian.log_var)
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


def test_other_texts_and_other_weights_have_files_of_their_own(loaded, tmp_path):
    embed(loaded, tmp_path)
    assert embed(loaded, tmp_path, TEXTS[:2]).cache == "computed"
    from probemb.models import DualEncoder

    other = DualEncoder(loaded.model.config).eval()
    other.load_state_dict(loaded.model.state_dict())
    assert embed(loaded, tmp_path, model=other).cache == "read"
    with torch.no_grad():
        other.shift.add_(1e-6)
    assert embed(loaded, tmp_path, model=other).cache == "computed"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty"])
def test_a_damaged_cache_file_is_computed_again_and_said_so(loaded, tmp_path, damage):
    true = embed(loaded, tmp_path).gaussian
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    if damage == "other":
        embed(loaded, tmp_path / "b", TEXTS[::-1])
        data = next((tmp_path / "b").iterdir()).read_bytes()
    changed = {"cut": data[:-7], "flipped": data[:-1] + bytes([data[-1] ^ 64]), "other": data, "empty": b""}[damage]
    file.write_bytes(changed)
    again = embed(loaded, tmp_path)
    assert again.cache == "recomputed"
    assert str(file) in again.message
    assert torch.equal(again.gaussian.mean, true.mean)
    assert embed(loaded, tmp_path).cache == "read"


def test_a_cache_folder_that_cannot_be_written_costs_only_the_cache(loaded, tmp_path):
    (tmp_path / "file").write_text("")
    found = embed(loaded, tmp_path / "file" / "folder")
    assert found.cache == "computed"
    assert "not cached" in found.message
