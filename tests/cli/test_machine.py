"""Counts of processes and threads are bound by the machine, in every command that takes one."""

import importlib

import pytest

from probemb.cli.device import precision_words, training_precision
from probemb.cli.machine import COMPUTING, cores, machine_memory, memory_limits, refuse_crowd
from probemb.errors import UserError

COUNTS = [  # command, arguments, the option, its bound
    ("pretrain.run", ["--data.train=x"], "--data.workers", COMPUTING),
    ("zeroshot.imagenet", ["--data=x"], "--workers", COMPUTING),
    ("tools.make_scenes", ["x"], "--workers", COMPUTING),
]


@pytest.mark.parametrize(("module", "words", "option", "most"), COUNTS)
def test_more_than_the_machine_can_use_is_refused_with_the_bound(module, words, option, most, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [module, *words, option, "100000"])
    with pytest.raises(UserError) as error:
        importlib.import_module(module).main()
    assert f"{option} is 100000." in error.value.what
    assert f"to {most:,} (this machine has {cores()} CPU core" in error.value.remedy
    assert not any(tmp_path.iterdir())


def test_ranks_of_a_machine_share_the_bound(monkeypatch):
    """Each rank's count alone is within it."""
    from probemb.cli.device import share_cores

    refuse_crowd(COMPUTING // 2, "data.workers", ranks=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for threads, workers, name in ((COMPUTING, 0, "engine.threads"), (1, COMPUTING, "data.workers")):
        with pytest.raises(UserError) as error:
            share_cores(threads, workers)
        assert error.value.what == f"{name} is {COMPUTING}, for each of 4 processes on this machine."
        assert error.value.remedy.startswith(f"Set it to at most {COMPUTING // 4}: this machine has")


def test_bf16_is_for_gpus_that_have_it():
    v100, a100, none = (7, 0), (8, 0), None
    assert [training_precision("auto", gpu) for gpu in (v100, a100, none)] == ["fp32", "bf16", "fp32"]
    assert [training_precision("bf16", gpu) for gpu in (a100, none)] == ["bf16", "bf16"]
    with pytest.raises(UserError, match=r"compute capability 7\.0\) has no bf16"):
        training_precision("bf16", v100)
    assert precision_words("fp32", v100) == "fp32 (this GPU has no bf16)"
    assert [precision_words("fp32", gpu) for gpu in (a100, none)] == ["fp32", "fp32"]


def test_a_container_has_the_memory_of_its_control_group(tmp_path):
    files = {"memory.max": "max", "slurm/memory.max": str(8 << 30), "slurm/job_7/memory.max": str(4 << 30)}
    files["memory/docker/memory.limit_in_bytes"] = str(2 << 30)
    for name, limit in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n")
    (tmp_path / "own").write_text("0::/slurm/job_7\n")
    assert sorted(memory_limits(tmp_path / "own", tmp_path)) == [4 << 30, 8 << 30]
    (tmp_path / "own").write_text("5:cpu,memory:/docker\n0::/\n")
    assert memory_limits(tmp_path / "own", tmp_path) == [2 << 30]
    assert memory_limits(tmp_path / "absent", tmp_path) == []
    assert machine_memory() >= 1 << 20
