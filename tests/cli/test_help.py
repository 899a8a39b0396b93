"""The help of commands with many options."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.methods import METHODS
from probemb.cli.configuration import known_keys, parse_config

ROOT = Path(__file__).resolve().parents[2]
LONG = {
    "pretrain.run": "pretrain.config:Config",
    "finetune.run": "finetune.config:Config",
}


def shown(module: str, *words: str) -> str:
    """What the command prints on a terminal of 80 columns."""
    code = f"import sys; sys.argv = ['x', *{list(words)}]; from {module} import main; main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("module", LONG)
def test_one_screen_of_help_and_the_rest_on_request(module):
    name, _, kind = LONG[module].partition(":")
    config = getattr(importlib.import_module(name), kind)
    brief, everything = shown(module, "--help"), shown(module, "--help-all")
    lines = brief.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(options) == len(set(options))
    for one in config.COMMON:
        assert any(option == f"--{one}" or option.startswith(f"--{one}.") for option in options), one
    assert "--help-all lists" in lines[-1]
    for key in known_keys(config):
        assert f"--{key}" in everything
    assert len(everything.splitlines()) > 2 * len(lines)


def test_help_of_a_method_has_its_options_and_no_other_s_and_names_all_methods():
    vse = shown("finetune.run", "--help", "--method", "vse")
    assert "--loss.margin" in vse
    assert "--loss.vib" not in vse
    for method in METHODS:
        assert re.search(rf"^  .*[ :]{method}(,|$)", vse, re.MULTILINE), method


@pytest.mark.parametrize(
    "kind",
    [
        "zeroshot.imagenet:ImagenetConfig", "zeroshot.analyses:AlgebraConfig", "slurm.submit:Submission",
        "tools.download.command:Download",
    ],
)  # fmt: skip
def test_other_commands_show_all_options_on_one_screen(kind, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    name, _, kind = kind.partition(":")
    config = getattr(importlib.import_module(name), kind)
    with pytest.raises(SystemExit):
        parse_config(config, "python -m x", "A description.", ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100
    assert "type:" not in "".join(lines)
    assert [line.split()[0] for line in lines if line.startswith("  --")][1:] == [f"--{k}" for k in known_keys(config)]
