"""A download that is killed or interrupted: whole tars, nothing that goes on by itself, and the rest the next time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from probemb.errors import UserError
from tests.imagesite import serve_images
from tools.download.command import main
from tools.shards import main as shards_command

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def site():
    with serve_images() as site:
        yield site


def start(site, tmp_path, words, *options) -> tuple[subprocess.Popen, list[str], Path]:
    """The command in a session of its own, its first words, and its folder."""
    path, out = tmp_path / "list.tsv", tmp_path / "out"
    path.write_text("".join(f"a picture called {word}\t{site.address}/{word}\n" for word in words))
    argv = ["cc3m", str(path), "--out", str(out), "--shard-size", "10", "--private-hosts"]
    command = subprocess.Popen(
        [sys.executable, "-m", "tools.download", *argv, *options],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    return command, argv, out


def until(done, command) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit
        assert command.poll() is None, command.stderr.read().decode()
        time.sleep(0.02)


def session(leader: int) -> dict[int, int]:
    """When each process of a session that still runs was started, in clock ticks; process numbers start anew."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # from the state on, which proc(5) counts as 3
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found[int(path.parent.name)] = int(fields[19])
    return found


def test_a_killed_command_leaves_whole_tars_and_goes_on(site, tmp_path, capsys):
    site.pause = 0.1
    words = [f"ok/killed{i}" for i in range(120)]
    command, argv, out = start(site, tmp_path, words, "--threads", "1", "--processes", "2")
    until(lambda: list(out.glob("*.tar")), command)
    with pytest.raises(UserError, match="is writing it"):
        main(argv)
    command.kill()  # its processes end by themselves
    command.wait()
    command.stderr.close()
    limit = time.monotonic() + 10
    while session(command.pid):
        assert time.monotonic() < limit, session(command.pid)
        time.sleep(0.05)
    done = {path: path.read_bytes() for path in out.glob("*.tar")}
    assert 1 <= len(done) < 12
    before = site.requests.copy()
    site.pause = 0
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["got"] == 120
    assert shards_command(["verify", str(out), "--workers", "1"]) == 0
    assert all(path.read_bytes() == data for path, data in done.items())
    assert sum((site.requests - before).values()) <= 120 - 10 * len(done)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_an_interrupted_command_ends_its_processes(site, tmp_path):
    words = [f"silent/{i}" for i in range(4)]
    command, _, out = start(site, tmp_path, words, "--patience", "25", "--processes", "1")
    until(lambda: any(path.startswith("/silent") for path in site.requests), command)
    assert len(session(command.pid)) > 1
    command.terminate()
    _, told = command.communicate(timeout=15)
    assert command.returncode == 130
    assert told.decode().endswith("interrupted\n")
    limit = time.monotonic() + 10
    while session(command.pid):
        assert time.monotonic() < limit, session(command.pid)
        time.sleep(0.05)
    assert not list(out.glob("*.tar"))


@pytest.mark.parametrize(
    ("which", "said"), [(-1, "A process was ended by signal 9"), (-2, "A process ended with exit code 255")]
)
def test_a_killed_process_is_told(site, tmp_path, which, said):
    """The one that fetches, and the one that started it; img2dataset's own pool would wait for ever."""
    words = [f"silent/{i}" for i in range(4)]
    command, _, out = start(site, tmp_path, words, "--patience", "25", "--processes", "1")
    until(lambda: any(path.startswith("/silent") for path in site.requests), command)
    started = session(command.pid)
    os.kill(sorted(started, key=started.get)[which], signal.SIGKILL)
    _, told = command.communicate(timeout=15)
    assert command.returncode == 2
    assert f"error: {said}" in told.decode()
    assert not list(out.glob("*.tar"))
