"""How every command reads its configuration and how it ends on an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from probemb.cli.command import Parser, run_command
from probemb.errors import UserError, nearest

ROOT = Path(__file__).resolve().parents[2]


def test_errors_write_no_control_characters(capsys):
    """An error may quote what a server or a file said."""

    def fails():
        raise UserError("The server says \x1b[31m\x00\u202e.", "Ask another.")

    with pytest.raises(SystemExit):
        run_command(fails)
    assert capsys.readouterr().err == "error: The server says \ufffd[31m\ufffd\ufffd.\n       Ask another.\n"


def test_the_error_stands_in_torchrun_s_report(monkeypatch, tmp_path, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fails():
        raise UserError("The disk is full.", "Make room.")

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit):
        run_command(fails)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    report = ChildFailedError("pretrain.run", {0: failure}).format_msg()
    assert "traceback : error: The disk is full.\n         Make room.\n=" in report


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


def test_nearest_says_nothing_where_nothing_is_near():
    assert nearest("wasserstien2", ["csd", "wasserstein2"]) == " Did you mean 'wasserstein2'?"
    assert nearest("zzz", ["csd"]) == ""
    assert nearest("--loss.over_items", ["--loss.word_width", "--loss.reduce"]) == ""  # only what all share is alike
    assert nearest("--optimiser.lr", ["--optimizer.eps", "--optimizer.lr"]) == " Did you mean '--optimizer.lr'?"


def test_a_misspelt_option_of_a_command_of_argparse_suggests_the_right_one():
    parser = Parser(prog="x")
    parser.add_argument("--data")
    with pytest.raises(UserError, match=r"Unrecognized arguments: --dta=1\. Did you mean '--data'\?"):
        parser.parse_args(["--dta=1"])


def test_nearest_knows_a_name_without_its_group_and_pcmepp():
    options = ["--optimizer.lr", "--optimizer.name", "--model.name", "--seed"]
    assert nearest("--lr", options) == " Did you mean '--optimizer.lr'?"
    assert nearest("--name", options) == " Did you mean '--optimizer.name' or '--model.name'?"
    assert nearest("PCME++", ["pcme", "pcmepp", "pcmepp-mu"]) == " Did you mean 'pcmepp'?"


COMMANDS = ["pretrain.run", "zeroshot.imagenet"]


@pytest.mark.parametrize("module", COMMANDS)
def test_help_imports_nothing_heavy(module):
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "heavy = {'torch', 'open_clip', 'deepspeed', 'matplotlib', 'faiss'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("module", ["pretrain.run"])
def test_a_wrong_option_ends_in_two_lines_and_code_2(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", module, "--modle", "x"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: There is no option --modle.")
    assert len(done.stderr.strip().splitlines()) == 2
    assert not any(tmp_path.iterdir())
