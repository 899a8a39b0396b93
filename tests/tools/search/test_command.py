"""python -m tools.search: ranking against brute force, composition, refusal, and bad input."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain
from pathlib import Path

import pytest
import torch

from probemb.cli.command import run_command
from probemb.compose import as_query, compose
from probemb.distances import csd
from probemb.errors import UserError
from probemb.gaussian import Gaussian
from probemb.models import create_model, load_model, save_model
from probemb.models.word_tokenizer import WordTokenizer
from tests.searching import EVIL, N, bomb, gallery, searcher  # noqa: F401 - fixtures
from tests.world import run_folder  # noqa: F401 - a fixture
from tools.search.command import main, open_searcher, parse
from tools.search.pictures import read_picture
from tools.search.tables import print_answer
from tools.search.web.about import describe
from tools.search.wish import MAX_TEXT, QueryImage, Wish, read_image


def brute_force(gallery, query):  # noqa: F811
    """Gallery rows, closest first, and their CSD."""
    distance, order = csd(query[None], gallery.embedded)[0].sort()
    return order.tolist(), distance


def rows(answer):
    return [result["row"] for result in answer["results"]]


def ask(gallery, capsys, *argv, index=None, code=0):  # noqa: F811
    """The command's JSON."""
    assert main([*map(str, argv), "--index", str(index or gallery.images), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_text_is_ranked_by_csd(gallery, searcher):  # noqa: F811
    answer = searcher.answer(Wish(["a red circle"], top=N))
    order, distance = brute_force(gallery, searcher.encoder.embed(["a red circle"], [])[0])
    assert rows(answer) == order
    assert [one["distance"] for one in answer["results"]] == pytest.approx(distance.tolist(), abs=1e-4)
    assert [one["captions"] for one in answer["results"]] == [gallery.captions[row] for row in order]
    assert [one["rank"] for one in answer["results"]] == list(range(1, N + 1))


def test_words_that_the_model_does_not_know_are_named(searcher, monkeypatch, capsys):  # noqa: F811
    wish = Wish(["a red zebra", "[b]quagga"])
    assert searcher.answer(wish)["query"]["unknown_words"] == []  # parts of words
    words = searcher.encoder.loaded._replace(tokenizer=WordTokenizer(["a", "red", "b"], 8))
    monkeypatch.setattr(searcher.encoder, "loaded", words)
    answer = searcher.answer(wish)
    assert answer["query"]["unknown_words"] == ["zebra", "quagga"]
    print_answer(answer)
    assert "the model does not know: zebra, quagga" in capsys.readouterr().out


def test_the_scale_of_the_page_spans_texts(gallery, searcher):  # noqa: F811
    u = searcher.encoder.embed_texts([captions[0][:200] for captions in gallery.captions]).uncertainty()
    assert describe(searcher)["queries"] == pytest.approx([float(u.min()), float(u.max())], rel=1e-4)


def test_an_index_made_with_relative_paths_works_from_any_folder(gallery, tmp_path, monkeypatch):  # noqa: F811
    from tools.build_index import main as build
    from tools.embed.command import main as embed

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(gallery.model)
    (tmp_path / "data").symlink_to(gallery.tar.parent)
    monkeypatch.chdir(tmp_path)
    assert embed(["--model", "run", "--data", "data", "--out", "embedded", "--items", "image"]) == 0
    assert build(["--embeddings", "embedded", "--kind", "image", "--out", "index"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    searcher = open_searcher(parse(["anything", "--index", "../index", "--device", "cpu"]))  # noqa: F811
    answer = searcher.answer(Wish(["a red circle"], top=1))
    shown = searcher.index.items[answer["results"][0]["row"]]
    assert read_picture(shown["shard"], shown["offset"], shown["size"]) in gallery.jpegs


def test_an_image_finds_itself_among_the_means(gallery, searcher):  # noqa: F811
    image = QueryImage("q.jpg", gallery.jpegs[7])
    query = searcher.encoder.embed([], [image])[0]
    torch.testing.assert_close(query.mean, gallery.embedded.mean[7], atol=1e-3, rtol=0)
    answer = searcher.answer(Wish(images=[image], top=5))
    assert rows(answer) == brute_force(gallery, query)[0][:5]
    u = pytest.approx(float(query.uncertainty()))
    assert answer["query"]["parts"] == [{"kind": "image", "uncertainty": u, "weight": 1}]


def test_several_parts_are_their_product(gallery, searcher, tmp_path, capsys):  # noqa: F811
    (tmp_path / "x.jpg").write_bytes(gallery.jpegs[3])
    answer = ask(gallery, capsys, "a red circle", "a blue square", "--image", tmp_path / "x.jpg", "--top", 6)
    parts = searcher.encoder.embed(["a red circle", "a blue square"], [QueryImage("x", gallery.jpegs[3])])
    product = compose(parts)
    order, distance = brute_force(gallery, as_query(product.gaussian))
    assert rows(answer) == order[:6]
    assert [one["distance"] for one in answer["results"]] == pytest.approx(distance[:6].tolist(), abs=1e-4)
    assert [part["kind"] for part in answer["query"]["parts"]] == ["text", "text", "image"]
    assert answer["query"]["log_normaliser"] == pytest.approx(float(product.log_normaliser), rel=1e-5)
    assert answer["query"]["uncertainty"] < min(part["uncertainty"] for part in answer["query"]["parts"])


def test_an_index_of_captions(gallery, capsys, tmp_path):  # noqa: F811
    (tmp_path / "x.png").write_bytes(gallery.jpegs[0])
    answer = ask(gallery, capsys, "--image", tmp_path / "x.png", "--top", 120, index=gallery.texts)
    assert sorted(one["captions"][0] for one in answer["results"]) == sorted(chain(*gallery.captions))


def test_an_index_of_means_is_reranked(gallery, searcher, tmp_path, capsys):  # noqa: F811
    from tools.build_index import main as build

    out = tmp_path / "means"
    build(["--embeddings", str(gallery.images.parent / "embedded"), "--form", "mean", "--out", str(out)])
    capsys.readouterr()
    answer = ask(gallery, capsys, "a red circle", "--top", 10, index=out)
    assert rows(answer) == rows(searcher.answer(Wish(["a red circle"])))  # 10 x 10 candidates are all of them
    means = (gallery.embedded.mean - searcher.encoder.embed(["a red circle"], []).mean).square().sum(1)
    by_mean, by_csd = means.argsort().tolist(), rows(answer)
    k = next(k for k in range(1, 10) if set(by_mean[:k]) != set(by_csd[:k]))
    few = ask(gallery, capsys, "a red circle", "--rerank", k, "--top", k, index=out)
    assert set(rows(few)) == set(by_mean[:k])


def test_uncertain_results_are_left_out(gallery, searcher, capsys):  # noqa: F811
    u = gallery.embedded.uncertainty()
    limit = float(u.sort().values[4]) + 1e-6
    answer = searcher.answer(Wish(["a red circle"], top=3, max_item_uncertainty=limit))
    order = [row for row in brute_force(gallery, searcher.encoder.embed(["a red circle"], [])[0])[0] if u[row] <= limit]
    assert rows(answer) == order[:3]  # 5 of 40 are certain enough: more than 3 had to be looked at
    assert answer["looked_at"] > 3
    assert rows(searcher.answer(Wish(["a red circle"], top=9, max_item_uncertainty=limit))) == order
    assert searcher.answer(Wish(["a red circle"], max_item_uncertainty=0.0))["results"] == []
    assert main(["a red circle", "--max-item-uncertainty", "0", "--index", str(gallery.images)]) == 0
    out = capsys.readouterr().out
    assert "no certain enough result" in out
    assert "caption" not in out  # no table without rows


def test_an_ambiguous_query_is_refused(gallery, capsys):  # noqa: F811
    u = ask(gallery, capsys, "a red circle")["query"]["uncertainty"]
    assert ask(gallery, capsys, "a red circle", "--max-uncertainty", u + 1e-4)["results"]
    answer = ask(gallery, capsys, "a red circle", "--max-uncertainty", u - 1e-4, code=1)
    assert answer["refused"]
    assert answer["results"] == []
    assert answer["limit"] == pytest.approx(u - 1e-4)
    assert main(["a red circle", "--max-uncertainty", "0.1", "--index", str(gallery.images)]) == 1
    assert "refused: that is above 0.1" in capsys.readouterr().out


def test_another_model_is_refused_with_both_names(gallery, tmp_path):  # noqa: F811
    torch.manual_seed(9)
    save_model(create_model("ViT-Micro-32"), tmp_path / "other" / "model")
    with pytest.raises(UserError) as error:
        main(["a dog", "--index", str(gallery.images), "--model", str(tmp_path / "other")])
    assert str(gallery.model) in str(error.value)
    assert str(tmp_path / "other") in str(error.value)


def test_a_model_that_lies_elsewhere_now(gallery, tmp_path):  # noqa: F811
    import shutil

    index = tmp_path / "index"
    shutil.copytree(gallery.images, index)
    about = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(about | {"model": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match=r"gone.*was made with it; --model names it"):
        main(["a dog", "--index", str(index)])
    assert main(["a dog", "--index", str(index), "--model", str(gallery.model)]) == 0


def test_captions_cannot_speak_to_the_terminal(gallery, capsys):  # noqa: F811
    assert main(["anything", "--index", str(gallery.images), "--top", str(N)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "[red]not" in out
    assert "markup[/red]" in out
    assert any(EVIL in one["captions"] for one in ask(gallery, capsys, "anything", "--top", N)["results"])


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ([], "The query is empty"),
        (["  ", ""], "The query is empty"),
        (["a", "--top", "0"], "0 results"),
        (["a", "--max-uncertainty", "nan"], "is nan"),
        (["a", "--min-precision", "1.5"], "1.5"),
        (["a", "--top", "1000000"], "1000000 results"),
        (["a", "--top", "1e3"], "--top: invalid int value"),
        (["a", "--max-uncertainty", "-1"], "is -1"),
        (["a", "--max-item-uncertainty", "inf"], "is inf"),
        (["a", "--min-precision", "nan"], "is nan"),
        (["a", "--min-precision", "0"], "precision is 0"),
        (["a", ""], "One of the texts is empty"),
        (["bad \udcff text"], "is not UTF-8"),
        (["a", "--rerank", "20"], "already ranks by CSD"),
        (["a", "--rerank", "5"], "--rerank is 5, --top 10"),
        (["a", "--effort", "4"], "always searches everything"),
        (["a", "--effort", "0"], "--effort is 0"),
        (["a", "--effort", str(10**30)], "of 40 items"),
        (["--serve", "--max-upload", "0"], "--max-upload is 0"),
        (["--serve", "--max-upload", "100000"], "--max-upload is 100000"),
        (["--serve", "--port", "-1"], "--port is -1"),
        (["--calibrate", "x", "--within", "0"], "--within is 0"),
        (["a" * (MAX_TEXT + 1)], "characters"),
        (["a"] * 9, "9 parts"),
        (["a", "--serve"], "exclude each other"),
        (["--image", "nowhere.jpg"], "cannot be read"),
        (["a", "--model", "nowhere"], "does not exist"),
        (["--serve", "--port", "70000"], "--port is 70000"),
        (["--calibrate", "nowhere"], "nowhere"),
        (["--serve", "--top", "5"], "--top does not belong to --serve"),
        (["a", "--port", "80"], "--port does not belong to a query"),
    ],
)
def test_bad_input(gallery, argv, what):  # noqa: F811
    with pytest.raises(UserError, match=what):
        main([*argv, "--index", str(gallery.images)])


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"<svg onload='alert(1)'/>", "huge", "cut"])
def test_a_query_that_is_no_image(gallery, tmp_path, data):  # noqa: F811
    data = bomb() if data == "huge" else gallery.jpegs[0][:200] if data == "cut" else data
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(UserError, match="not an image that can be searched with"):
        main(["--image", str(tmp_path / "x.jpg"), "--index", str(gallery.images)])


def test_an_image_without_an_end(monkeypatch):
    """Of a pipe or a device no more is read than an image may have."""
    monkeypatch.setattr("probemb.data.shards.samples.MAX_IMAGE_BYTES", 1000)
    out, into = os.pipe()
    os.write(into, bytes(5000))
    os.close(into)
    try:
        with pytest.raises(UserError, match="has more than"):
            read_image(Path(f"/dev/fd/{out}"))
    finally:
        os.close(out)


def test_no_index():
    with pytest.raises(UserError, match="--index is given 2 times"):
        main(["a dog", "--index", "a", "--index", "b"])
    with pytest.raises(UserError, match="b is given twice"):
        main(["--serve", "--index", "a/../b", "--index", "b", "--index", "b"])
    with pytest.raises(UserError, match="--index is missing"):
        parse(["a dog"])
    with pytest.raises(UserError, match="There is no index in nowhere"):
        main(["a dog", "--index", "nowhere"])


def test_a_picture_is_read_from_its_place(gallery, searcher, tmp_path):  # noqa: F811
    assert [searcher.picture(row) for row in range(N)] == gallery.jpegs
    from tools.search.pictures import read_member

    with pytest.raises(LookupError, match="shorter"):
        read_member(gallery.tar, gallery.tar.stat().st_size - 10, 100)
    for place in ((tmp_path, 0, 10), (tmp_path / "gone.tar", 0, 10), (gallery.tar, -1, 10), (gallery.tar, 0, 1 << 40)):
        with pytest.raises(LookupError):
            read_member(*place)


def test_cancelling_parts(searcher):  # noqa: F811
    parts = Gaussian(torch.tensor([[1.0, 0], [-1, 0]]), torch.zeros(2, 2))
    with pytest.raises(UserError, match="cancel"):
        as_query(compose(parts).gaussian)


def test_the_command_ends_in_two_lines_and_code_2(gallery):  # noqa: F811
    command = [sys.executable, "-m", "tools.search", "", "--index", str(gallery.images)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == "error: The query is empty."
    assert len(ended.stderr.splitlines()) == 2


def test_queries_of_the_gallerys_own_model(gallery, searcher):  # noqa: F811
    model, tokenizer, _ = load_model(gallery.model)
    with torch.inference_mode():
        truth = model.encode_text(tokenizer(["a dog"]))
    torch.testing.assert_close(searcher.encoder.embed([" a dog "], []).mean, truth.mean)


def test_the_page_is_served_until_the_command_is_told_to_end(gallery, tmp_path):  # noqa: F811
    log = tmp_path / "log"

    def work():  # forked, so that nothing is imported again
        with open(log, "w", buffering=1) as out, redirect_stdout(out), redirect_stderr(out):
            folders = ["--index", str(gallery.images), "--index", str(gallery.texts)]
            run_command(lambda: main(["--serve", "--port", "0", *folders]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    try:
        end = time.monotonic() + 30
        while not (log.exists() and log.read_text().endswith("(end with Ctrl-C)\n")):
            assert process.is_alive()
            assert time.monotonic() < end
            time.sleep(0.05)
        line = log.read_text()
        assert line.startswith("serving http://127.0.0.1:")
        with urllib.request.urlopen(f"{line.split()[1]}about", timeout=10) as response:
            told = [(one["name"], one["count"], one["kind"]) for one in json.load(response)["indexes"]]
        assert told == [("image", 40, "image"), ("text", 120, "text")]
        os.kill(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == 0
        assert log.read_text() == line
    finally:
        process.kill()
        process.join()
