"""`probemb pretrain …`, `probemb zeroshot imagenet …`: the commands of an installed package.

A wheel has the stages in `probemb/stages`, a clone beside `probemb`, so that an environment gets no module with a name
as general as `tools`.
"""

import ast
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

from probemb.cli.command import run_command
from probemb.errors import UserError, nearest

PACKAGE = Path(__file__).parents[1]
ROOT = stages if (stages := PACKAGE / "stages").is_dir() else PACKAGE.parent
STAGES = ("pretrain", "finetune", "zeroshot", "slurm", "tools")


class Command(NamedTuple):
    """module: as of `python -m`; about: the first line of its docstring."""

    module: str
    about: str


def main() -> None:
    run_command(_start)


def commands() -> dict[str, Command]:
    """The commands by their words: "pretrain" is pretrain.run, "zeroshot imagenet" and "search" are themselves."""
    found = {}
    for stage in STAGES:
        for file in sorted({*(ROOT / stage).glob("*.py"), *(ROOT / stage).glob("*/__main__.py")}):
            text = file.read_text("utf-8")
            if "    run_command(main)\n" not in text:
                continue
            if file.stem == "__main__":  # of a package, whose docstring is that of its command.py
                file, text = file.parent, file.with_name("command.py").read_text("utf-8")
            module = f"{stage}.{file.stem}"
            words = module.removeprefix("tools.").removesuffix(".run").replace(".", " ")
            found[words] = Command(module, (ast.get_docstring(ast.parse(text)) or "").split("\n")[0])
    return found


def _start() -> None:
    known, words = commands(), sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print("usage: probemb COMMAND [--help] …\n")
        print("\n".join(f"  {name:{max(map(len, known))}}  {command.about}" for name, command in known.items()))
        print("\nTexts that say `python -m zeroshot.imagenet` mean `probemb zeroshot imagenet`.")
        return
    name = next((name for n in (2, 1) if (name := " ".join(words[:n])) in known), None)
    if name is None:
        asked = " ".join(word for word in words[:2] if not word.startswith("-"))
        raise UserError(f"There is no command '{asked}'.{nearest(asked, known)}", "`probemb --help` lists them.")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(ROOT))
    sys.argv = [f"probemb {name}", *words[len(name.split()) :]]
    runpy.run_module(known[name].module, run_name="__main__", alter_sys=True)
