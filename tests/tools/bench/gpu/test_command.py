"""The command runs checks in processes of their own: one that fails, crashes or hangs ends no other."""

import json
import sys
import time
from pathlib import Path

import pytest

from probemb.errors import UserError
from tools.bench.gpu import __main__ as command
from tools.bench.gpu.checks import CHECKS, Check
from tools.bench.gpu.notes import Notes
from tools.bench.gpu.report import findings
from tools.bench.gpu.running import run_checks, to_json

PROGRAM = """
import argparse, os, sys, time
from pathlib import Path
from tools.bench.gpu.notes import Notes

parser = argparse.ArgumentParser()
parser.add_argument("--run"), parser.add_argument("--notes", type=Path)
parser.add_argument("--seconds", type=float), parser.add_argument("--small", action="store_true")
options = parser.parse_args()
notes, name = Notes(options.notes), options.run
notes.value("small", options.small)
if name == "good":
    notes.claim("it is so", True)
    notes.skip("a part", "no reason")
elif name == "bad":
    notes.claim("one and one is two", True)
    notes.claim("one and one is three", False)
elif name == "crashing":
    notes.claim("it starts", True)
    sys.exit("no memory left")
elif name == "hanging":
    notes.claim("it starts", True)
    if os.fork() == 0:  # a process of its own, which must not stay behind
        Path(PID).write_text(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)
elif name == "skipped":
    notes.skip("", "no such thing here")
elif name.startswith("timed"):
    time.sleep(0.5)
    notes.value("from", time.time() - 0.5)
    notes.claim("it is so", True)
"""


@pytest.fixture
def outcomes(tmp_path):
    script, pid = tmp_path / "program.py", tmp_path / "pid"
    script.write_text(PROGRAM.replace("PID", repr(str(pid))))
    names = ["timed-1", "good", "bad", "crashing", "hanging", "skipped", "silent", "timed-2"]
    checks = {name: Check("", 6 if name == "hanging" else 60, name.startswith("timed")) for name in names}
    told = []
    began = time.time()
    found = run_checks(checks, True, 1.0, 4, lambda outcome: told.append(outcome.name), (sys.executable, str(script)))
    assert sorted(told) == sorted(names)
    assert [outcome.name for outcome in found] == names
    assert time.time() - began < 60
    return {outcome.name: outcome for outcome in found}, pid


def runs(pid: int) -> bool:
    """Whether a process is there after ten seconds; one that was killed may wait for its parent to collect it."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.1)
    return True


def test_every_check_ends_in_its_own_way(outcomes):
    found, pid = outcomes
    ended = {name: outcome.ended for name, outcome in found.items()}
    assert ended == {
        "timed-1": "passed",
        "good": "passed",
        "bad": "failed",
        "crashing": "crashed",
        "hanging": "overran",
        "skipped": "skipped",
        "silent": "failed",  # it claimed nothing
        "timed-2": "passed",
    }
    assert [name for name, outcome in found.items() if outcome.fine] == ["timed-1", "good", "skipped", "timed-2"]
    assert found["hanging"].notes.claims == [["it starts", True]]  # what it had found is kept
    assert 6 <= found["hanging"].seconds < 20
    assert "no memory left" in found["crashing"].output
    assert not runs(int(pid.read_text()))
    assert findings(found["bad"]) == ["small: True", "NOT TRUE: one and one is three"]
    assert "left out a part: no reason" in findings(found["good"])
    assert findings(found["skipped"])[-1] == "left out: no such thing here"
    record = json.loads(to_json(list(found.values()), {"machine": "x"}))
    assert record["machine"] == "x"
    assert record["checks"]["bad"]["notes"]["claims"][1] == ["one and one is three", False]


def test_timings_have_the_machine_to_themselves(outcomes):
    found, _ = outcomes
    first, second = (found[name].notes.values["from"] for name in ("timed-1", "timed-2"))
    assert second - first > 0.5


def test_notes_are_in_the_file_as_soon_as_they_are_made(tmp_path):
    notes = Notes(tmp_path / "notes.json")
    notes.value("loss", 2.5)
    notes.claim("it falls", False)
    assert Notes.read(tmp_path / "notes.json").values == {"loss": 2.5}
    notes.skip("", "no GPU")
    read = Notes.read(tmp_path / "notes.json")
    assert (read.claims, read.skipped) == ([["it falls", False]], {"": "no GPU"})
    assert Notes.read(tmp_path / "none") == Notes()


def test_unknown_checks_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "memry"])
    with pytest.raises(UserError, match="memory"):
        command.main()


@pytest.mark.slow
def test_the_command_prints_a_table_and_json_and_says_by_its_code_whether_all_is_well(monkeypatch, tmp_path, capsys):
    out = tmp_path / "found" / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", "--only", "attention", "--minutes", "90", "--out", str(out)])
    assert command.main() == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert json.loads(printed.splitlines()[-1]) == record
    assert "GPU check on" in printed
    assert set(record["checks"]) == {"attention"}
    assert record["small"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", "--only", "attention", "--minutes", "0.02"])
    assert command.main() == 1
    assert "overran" in capsys.readouterr().out
    assert set(CHECKS) > {"attention"}
