"""The stages are installed inside probemb, as `probemb/stages`: an environment gets no module called `tools`."""

from setuptools import find_packages, setup

STAGES = ("pretrain", "finetune", "zeroshot", "slurm", "tools")
inner = [f"probemb.stages.{name}" for name in find_packages() if name.partition(".")[0] in STAGES]
setup(
    packages=[*find_packages(include=["probemb*"]), *inner],
    package_dir={f"probemb.stages.{stage}": stage for stage in STAGES},
)
