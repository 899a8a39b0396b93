"""Every command: reading its configuration, and ending on an error."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from probemb.cli.command import run_command
from probemb.cli.console import commands
from probemb.errors import EXTRAS, UserError, nearest

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


def test_help_imports_nothing_heavy_and_names_the_methods_own_options():
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
    assert "[linear or exponential or sin]" in " ".join(done.stdout.split())  # of the method's own option


def test_missing_package_of_an_extra(monkeypatch, capsys):
    """The command names the extra; another missing module is a defect, and keeps its traceback."""
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: __import__("submitit"))
    assert ended.value.code == 2
    assert "pip install 'probemb[slurm]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        run_command(lambda: __import__("no_such_module"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(any(one.lower().startswith(name) for one in extras[extra]) for name, extra in EXTRAS.items())


@pytest.mark.slow
def test_installed_package(tmp_path):
    """A wheel has every command and its files, but only one name in site-packages."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, str(tree)], check=True)
    assert sorted(path.name for path in site.iterdir() if "dist-info" not in path.name) == ["bin", "probemb"]

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, str(site / "bin" / "probemb"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        return f"{done.returncode} {done.stdout}{done.stderr}"

    listed = run("--help")
    assert all(f"  {name}  " in listed for name in commands())
    assert run("zeroshot", "imagent").startswith(
        "2 error: There is no command 'zeroshot imagent'. Did you mean 'zeroshot imagenet'?"
    )
    assert run("finetune", "--help").startswith("0 usage")
    shipped = {path.name for path in site.rglob("*") if path.suffix not in (".py", ".pyc")}
    needed = {"pcmepp.yaml", "claims.yaml", "pretrain.sh", "page.js", "report.css", "ViT-Tiny-64.json", "py.typed"}
    assert shipped >= needed
    assert run("make_scenes", "scenes", "--train", "4", "--val", "2", "--classes-images", "4").startswith("0")
    assert (tmp_path / "scenes" / "train" / "index.json").exists()
