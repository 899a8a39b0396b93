"""A real Slurm on this machine: munged, slurmctld and one slurmd for each virtual node, all in one folder.

Every node has its own host name and address. Daemons run in the foreground as children of the tests and end with them,
however they end.
"""

import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.jobs import meeting_port

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
GPUS = 2  # that each node claims; Slurm counts them and hands them out, nothing can compute on them
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}
PR_SET_PDEATHSIG = 1


def missing() -> str:
    """The reason that no cluster can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if absent:
        return (
            f"Slurm is not installed ({', '.join(absent)} missing): apt-get install slurmctld slurmd slurm-client munge"
        )
    if os.geteuid() != 0:
        return "virtual Slurm nodes with host names of their own need root"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "this machine gives no namespaces (unshare --uts --mount), which virtual Slurm nodes need"
    return ""


class Cluster:
    """Virtual nodes, node1 to nodeN, until `stop()`; with the environment `env` Slurm's commands talk to them."""

    def __init__(self, nodes: int):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: Unix sockets live in it
        self.folder.chmod(0o755)
        self.nodes = [f"node{i + 1}" for i in range(nodes)]
        self.config = self.folder / "slurm.conf"
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.config), "LC_ALL": "C"}
        self.daemons: list[subprocess.Popen] = []
        try:
            self._start()
        except BaseException:
            logs = self.logs()
            self.stop()
            print(logs)
            raise

    def run(self, *argv: str, check: bool = True, **more) -> subprocess.CompletedProcess:
        """One of Slurm's commands, with its output."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, **more)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr or done.stdout}")
        return done

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Restarts, NodeList, ExitCode, ..."""
        line = self.run("scontrol", "show", "job", "--oneliner", job_id).stdout
        return dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", line))

    def until(self, what: str, done: Callable[[], object], job_id: str = "", seconds: float = 300) -> None:
        """Wait until `done()`; fails when it takes longer, or when `job_id` ends without it."""
        limit = time.monotonic() + seconds
        while not done():
            if job_id and self.job(job_id)["JobState"] in ENDED and not done():
                raise AssertionError(f"job {job_id} ended before {what}: {self.job(job_id)}")
            if time.monotonic() > limit:
                raise AssertionError(f"{what}: not within {seconds} s\n{self.run('squeue').stdout}\n{self.logs()}")
            time.sleep(0.2)

    def until_ended(self, job_id: str, seconds: float = 300) -> dict[str, str]:
        """Wait for the job's end; returns what is known of it then."""
        self.until(f"the end of job {job_id}", lambda: self.job(job_id)["JobState"] in ENDED, seconds=seconds)
        return self.job(job_id)

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        parts = []
        for path in sorted((self.folder / "log").glob("*")):
            parts.append(f"===== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:]))
        return "\n".join(parts)

    def _start(self) -> None:
        for name in ("munge", "state", "log", "gpu", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        self._write_config()
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self.socket = self.folder / "munge" / "sock"
        munge = {"key-file": key, "socket": self.socket, "pid-file": self.folder / "munge" / "pid"}
        munge |= {"seed-file": self.folder / "munge" / "seed", "log-file": self.folder / "log" / "munged"}
        self._daemon("munged", ["munged", "--foreground", *(f"--{key}={value}" for key, value in munge.items())])
        self.until("munged answers", lambda: not self._fails("munge", "--socket", str(self.socket), "--no-input"))
        self._daemon("slurmctld", ["slurmctld", "-D", "-f", str(self.config)])
        for node in self.nodes:
            self._daemon(f"slurmd.{node}", self._inside(node, f"exec slurmd -D -N {node} -f {self.config}"))
        self.until("the nodes are idle", lambda: self._idle() == len(self.nodes))

    def _address(self, node: int) -> str:
        """Of node i; -1 is the controller."""
        return f"127.0.1.{node + 2}"

    def _inside(self, node: str, command: str) -> list[str]:
        """`command` on a node: its own host name and name table."""
        setup = f"hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && {command}"
        return ["unshare", "--uts", "--mount", "bash", "-c", setup]

    def _write_config(self) -> None:
        here = socket.gethostname().split(".")[0]
        ports = [meeting_port() for _ in range(len(self.nodes) + 1)]
        for i in range(GPUS):
            (self.folder / "gpu" / f"gpu{i}").symlink_to("/dev/null")  # Slurm wants character devices
        names = f"node[1-{len(self.nodes)}]"
        (self.folder / "gres.conf").write_text(
            f"NodeName={names} AutoDetect=off Name=gpu File={self.folder}/gpu/gpu[0-{GPUS - 1}]\n"
        )
        hosts = [f"127.0.0.1 localhost\n{self._address(-1)} {here}"]
        hosts += [f"{self._address(i)} {node}" for i, node in enumerate(self.nodes)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        settings = {
            "ClusterName": "tests",
            "SlurmctldHost": f"{here}({self._address(-1)})",
            "SlurmctldPort": ports[0],
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.folder}/munge/sock,cred_expire=5",  # also how long a requeued job waits
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": f"{self.folder}/spool/%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd.%n.pid",
            # Nothing that a container refuses: no cgroups, no binding.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "SlurmdParameters": "config_overrides",  # nodes claim more than there is
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "GresTypes": "gpu",
            "ReturnToService": 1,  # a node that a test sets down stays down until it is resumed
            "FirstJobId": random.randrange(1000, 1_000_000),  # the ranks meet at a port that it decides
            "JobRequeue": 1,
            "KillWait": 30,  # as by default; ranks that are told to end save meanwhile
            "MinJobAge": 3600,  # ended jobs can still be asked about
            "MailProg": "/bin/true",
            "SchedulerParameters": "sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0",
            "AccountingStorageType": "accounting_storage/none",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        for i, node in enumerate(self.nodes):
            place = f"NodeName={node} NodeHostname={node} NodeAddr={self._address(i)} Port={ports[i + 1]}"
            lines.append(f"{place} CPUs=16 RealMemory=64000 Gres=gpu:{GPUS} State=UNKNOWN")
        lines.append("PartitionName=main Nodes=ALL Default=YES DefaultTime=60 MaxTime=INFINITE State=UP")
        self.config.write_text("\n".join(lines) + "\n")

    def _daemon(self, name: str, argv: list[str]) -> None:
        with (self.folder / "log" / name).open("ab") as log:
            how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self.daemons.append(subprocess.Popen(argv, env=self.env, preexec_fn=_end_with_parent, **how))

    def _idle(self) -> int:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).stdout.split()
        return states.count("idle")

    def _fails(self, *argv: str) -> bool:
        return bool(self.run(*argv, check=False).returncode)

    def stop(self) -> None:
        """End all jobs, the daemons of this cluster and nothing else, and remove the folder."""
        if self.daemons:
            self._fails("scancel", "--user=root")
            limit = time.monotonic() + 45  # longer than KillWait
            while time.monotonic() < limit and self.run("squeue", "--noheader", check=False).stdout.strip():
                time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.leftovers():  # steps outlive slurmd by design
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def leftovers(self, job_id: str = "") -> list[int]:
        """Processes of one job, or of the whole cluster, that are still there."""
        found = []
        ours = f"\0SLURM_CONF={self.config}\0"
        wanted = f"\0SLURM_JOB_ID={job_id}\0" if job_id else ""
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ = "\0" + path.read_text(errors="replace") + "\0"
            except OSError:
                continue  # it ended meanwhile
            if ours in environ and wanted in environ:
                found.append(int(path.parent.name))
        return found


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
