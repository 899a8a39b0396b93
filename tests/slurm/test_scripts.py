"""The scripts on a real Slurm: finetuning preempted, a node lost, a job cancelled."""

from tests.finetune.runs import OPTIONS
from tests.slurm.jobs import CPU, STEPS


def test_finetuning_is_preempted_requeued_and_finished(jobs):
    """USR1 to the batch script is what --signal=B:USR1@300 sends before the time limit."""
    given = {**OPTIONS, "model.pretrained": "null", "epochs": 8, "optimizer.warmup-epochs": 0}  # ends behind the signal
    given |= {"data.path": jobs.train.parent, "out": jobs.folder / "run"}
    job = jobs.submit(*(f"--{key}={value}" for key, value in given.items()), script="finetune.sh", **CPU)
    jobs.until_step(job, "run", 3)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert jobs.ended(job, "COMPLETED")["Restarts"] == "1"
    assert "resumed at step" in jobs.log(job)
    losses = [m["step"] for m in jobs.metrics("run") if "loss" in m]
    assert losses == list(range(1, 161))  # 64 images with five captions each, eight times


def test_a_failed_node_leads_to_a_requeue_and_a_finished_run(jobs):
    job = jobs.submit(*jobs.arguments("run", **{"save-every": 10}), **CPU)
    jobs.until_step(job, "run", 11)
    nodes = jobs.cluster.run("scontrol", "show", "hostnames", jobs.cluster.job(job)["NodeList"]).stdout.split()
    assert len(nodes) == 2
    lost = nodes[1]
    jobs.cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        seen = jobs.ended(job, "COMPLETED")
        used = jobs.cluster.run("scontrol", "show", "hostnames", seen["NodeList"]).stdout.split()
    finally:
        jobs.cluster.run("scontrol", "update", f"nodename={lost}", "state=resume")
    assert seen["Restarts"] == "1"
    assert lost not in used
    assert "resumed at step" in jobs.log(job)
    assert [m["step"] for m in jobs.metrics("run")] == list(range(1, STEPS + 1))


def test_scancel_ends_everything_and_brings_nothing_back(jobs):
    """The ranks save when they are told to end, as before a requeue: the script must not requeue then."""
    job = jobs.submit(*jobs.arguments("run", samples=16 * 10_000), **CPU)
    jobs.until_step(job, "run", 2)
    assert jobs.cluster.leftovers(job)
    jobs.cluster.run("scancel", job)
    seen = jobs.ended(job, "CANCELLED")
    jobs.cluster.until("all processes have ended", lambda: not jobs.cluster.leftovers(job))
    assert seen["Restarts"] == "0"
    assert "stopped by SIGTERM" in jobs.log(job)
    assert "ended by Slurm" in jobs.log(job)
    assert jobs.cluster.job(job)["JobState"] == "CANCELLED"
