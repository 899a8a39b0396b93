"""How every command reads its configuration and how it ends on an error."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from probemb.cli.command import parse_config, run_command, to_yaml
from probemb.errors import UserError, nearest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """A part.

    Args:
        rate: how fast.
    """

    rate: float = 0.5
    sizes: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Whole:
    """A whole."""

    name: str = "x"
    deep_switch: bool = False
    note: str | None = "n"
    part: Part = field(default_factory=Part)


def parse(*argv: str) -> Whole:
    return parse_config(Whole, "prog", "description", argv)


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("name: y\npart:\n  rate: 0.25\n")
    assert parse("--config", str(file)) == Whole("y", part=Part(0.25))
    assert parse("--config", str(file), "--part.rate", "1") == Whole("y", part=Part(1.0))
    assert parse("--part.sizes", "[3,4]").part.sizes == (3, 4)


def test_hyphens_and_bare_switches():
    assert parse("--deep-switch").deep_switch
    assert parse("--deep_switch", "--name", "z") == Whole("z", True)
    assert not parse("--deep-switch", "false").deep_switch
    assert not parse("--deep-switch", "--no-deep-switch").deep_switch
    assert parse("--no-note").note is None


def test_the_resolved_configuration_reads_back(tmp_path):
    config = Whole("ü", True, "m", Part(1e-5, (5, 6)))
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse("--config", str(file)) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--part.rte", "1"], "no option --part.rte. Did you mean '--part.rate'?"),
        (["--part.rate", "fast"], "part.rate is 'fast', which is not a number."),
        (["--part", "x"], "no option --part."),
        (["--config", "absent.yaml"], "absent.yaml does not exist"),
        (["stray"], "stray"),
    ],
)
def test_what_cannot_be_read_is_named(argv, message):
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("part:\n  rates: 1\n", "unknown key part.rates. Did you mean 'part.rate'?"),
        ("name: [", "not a YAML file"),
        ("just words", "holds no keys"),
        ("\x00", "not a YAML file"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, content, message):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        parse("--config", str(file))
    assert message in str(error.value)


def test_errors_write_no_control_characters(capsys):
    """An error may quote what a server or a file said."""

    def fails():
        raise UserError("The server says \x1b[31m\x00\u202e.", "Ask another.")

    with pytest.raises(SystemExit):
        run_command(fails)
    assert capsys.readouterr().err == "error: The server says \ufffd[31m\ufffd\ufffd.\n       Ask another.\n"


def test_an_interrupt_in_code_of_a_string_ends_alike(tmp_path):
    (tmp_path / "command.py").write_text(
        "from probemb.cli.command import run_command\n"
        "code = 'import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)'\n"
        "run_command(lambda: exec(code))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "command"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_nearest_says_nothing_where_nothing_is_near():
    assert nearest("wasserstien2", ["csd", "wasserstein2"]) == " Did you mean 'wasserstein2'?"
    assert nearest("zzz", ["csd"]) == ""


COMMANDS = ["pretrain.run", "zeroshot.imagenet", "zeroshot.retrieval", "tools.make_scenes", "tools.index_shards"]


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


@pytest.mark.parametrize("module", ["pretrain.run", "zeroshot.imagenet", "zeroshot.retrieval"])
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
