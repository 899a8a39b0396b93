"""Means and speed between two log lines."""

import torch

from probemb.runs.window import Window


def test_means_over_the_steps_between_two_log_lines():
    window = Window("pairs", lambda: 0.0)
    window.add({"loss": torch.tensor(1.0), "clean": 0.5})
    window.add({"loss": torch.tensor(4.0)})
    again = Window("pairs", lambda: 0.0, state=window.state())
    for one in (window, again):
        one.add({"loss": torch.tensor(4.0)})
        values = one.close(batch_size=8, steps_left=3)
        assert (values["loss"], values["clean"]) == (3.0, 0.5)
        assert one.state() == {"sums": {}, "counts": {}}
        assert values["pairs_per_second"] > 0
        assert 10 * 2**20 < values["memory"] < 2**40


def test_skipped_steps_count_for_the_speed_and_not_for_the_means():
    window = Window("images", lambda: 0.0)
    window.add({"loss": torch.tensor(2.0)})
    window.add(None)
    values = window.close(batch_size=8, steps_left=2)
    assert values["loss"] == 2.0
    assert values["images_per_second"] > 0
    window.add(None)
    assert set(window.close(batch_size=8, steps_left=1)) == {"data_wait", "images_per_second", "eta", "memory"}


def test_tokens_of_a_second_are_those_of_the_texts_that_are_computed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    window = Window("images", lambda: 0.0)
    for length in (10.0, 20.0, 30.0):
        window.add({"text_tokens": length})
    now[0] += 4.0
    values = window.read(batch_size=8, steps_left=0)
    assert values["images_per_second"] == 3 * 8 / 4
    assert values["tokens_per_second"] == 8 * (10 + 20 + 30) / 4
