"""The stages are installed inside probemb, as `probemb/stages`: an environment gets no module called `tools`."""

from setuptools import find_namespace_packages, setup

STAGES = ("pretrain", "finetune", "zeroshot", "slurm", "tools")
found = find_namespace_packages(include=[f"{name}{more}" for name in ("probemb", *STAGES) for more in ("", ".*")])
setup(
    packages=[name if name.startswith("probemb") else f"probemb.stages.{name}" for name in found],
    package_dir={f"probemb.stages.{stage}": stage for stage in STAGES},
)
