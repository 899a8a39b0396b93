"""Evaluation on another device than the host: the same numbers, and no tensor is left behind."""

import json
from contextlib import nullcontext
from importlib import import_module

import pytest

from probemb.machine import Device
from tests.pretended_gpu import PretendedGPU, needs_pretended_gpu
from tests.ranks import run_ranks


def evaluated(rank, world, module, options, out):
    """results.json of a command, on the CPU and on the pretended GPU."""
    main, runner = (import_module(f"zeroshot.{name}") for name in (module, "evaluations.runner"))
    found = []
    for gpu in (None, PretendedGPU()):
        device = Device("cpu" if gpu is None else str(gpu.device))
        runner.choose_device = lambda name, precision, device=device: device
        folder = out / device.name.partition(":")[0]
        with gpu or nullcontext():
            assert main.main([*options, "--out", str(folder)]) == 0
        found.append(json.loads((folder / "results.json").read_text()))
    return found


def compare(found, expected, where=""):
    """The same but for rounding; times, dates, paths and the plane of a figure aside."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            if not any(word in key for word in ("ms_", "seconds", "device", "out", "cache", "projection", "written")):
                compare(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected)):
            compare(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=0.02)  # two that nearly tie, where
    else:
        assert found == expected, where


@needs_pretended_gpu
def test_prompt_filters(run_folder, shards, tmp_path):
    options = ["--model", str(run_folder), "--data", str(shards), "--filter", "every", "--select-on", "folds:3"]
    found = run_ranks(1, evaluated, "imagenet", options, tmp_path)[0]
    compare(found[1], found[0])
