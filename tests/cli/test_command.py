"""Every command: reading its configuration, and ending on an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from probemb.cli.command import run_command
from probemb.errors import UserError, nearest

ROOT = Path(__file__).resolve().parents[2]


def test_errors_write_no_control_characters(capsys):
    """An error may quote what a server or a file said."""

    def fails():
        raise UserError("The server says \x1b[31m\x00\u202e.", "Ask another.")

    with pytest.raises(SystemExit):
        run_command(fails)
    assert capsys.readouterr().err == "error: The server says \ufffd[31m\ufffd\ufffd.\n       Ask another.\n"


@pytest.mark.parametrize("into", ["| head -c 1 >/dev/null", "> ascii.txt"])
def test_stdout_decides_nothing(tmp_path, into):
    """Closed, read no further, of another encoding, or on a full disk: the command does all of its work."""
    (tmp_path / "command.py").write_text(
        "import time\n"
        "from probemb.cli.command import run_command\n"
        "def main():\n"
        "    print('image \u2192 text ' * 9999, flush=True)\n"
        "    time.sleep(0.1)\n"
        "    print('image \u2192 text ' * 9999, flush=True)\n"
        "    with open('done', 'w') as file:\n        file.write('work')\n"
        "    return 7\n"
        "run_command(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    line = f"{{ {sys.executable} -m command; echo $? > code; }} {into}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert ((tmp_path / "code").read_text(), (tmp_path / "done").read_text()) == ("7\n", "work")
    if "ascii" in into:
        assert (tmp_path / "ascii.txt").read_text().startswith("image ? text image ?")


@pytest.mark.parametrize(
    ("word", "among", "told"),
    [
        ("wasserstien2", ["csd", "wasserstein2"], " Did you mean 'wasserstein2'?"),
        ("zzz", ["csd"], ""),
        ("--loss.over_items", ["--loss.word_width", "--loss.reduce"], ""),  # only what all share is alike
        ("--optimiser.lr", ["--optimizer.eps", "--optimizer.lr"], " Did you mean '--optimizer.lr'?"),
        ("--lr", ["--optimizer.lr", "--model.name"], " Did you mean '--optimizer.lr'?"),
        ("PCME++", ["pcme", "pcmepp", "pcmepp-mu"], " Did you mean 'pcmepp'?"),
    ],
)
def test_the_nearest_name_is_suggested_where_one_is_near(word, among, told):
    assert nearest(word, among) == told


def test_help_imports_nothing_heavy():
    code = (
        "import sys, runpy\n"
        "for name in ('pretrain.run', 'finetune.run', 'tools.embed', 'tools.search', 'tools.write_crops'):\n"
        "    sys.argv = [name, *(['--help-all', '--method', 'ncr'] if name == 'finetune.run' else ['--help'])]\n"
        "    try: runpy.run_module(name, run_name='__main__')\n"
        "    except SystemExit as e: assert e.code == 0, e.code\n"
        "assert not {'open_clip', 'timm', 'deepspeed', 'matplotlib', 'torchvision', 'accelerate'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
