"""A YAML file of a command's keys, checked before it is read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import yaml

from probemb.errors import UserError, nearest

BASE = "base"  # the key that names the file on which one builds
MOST = 1_000_000  # bytes of a file of options


class Loader(yaml.SafeLoader):
    """YAML as people read it: no aliases, no key twice in a mapping (YAML takes the last), and no numbers that YAML 1.1
    alone knows: 1:20 (80), 010 (8) and 0x10 are text.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                raise UserError(
                    f"{self.name} has the key {name} twice, in lines {seen[name]} and {line}.", "Remove one of them."
                )
            seen[name] = line
        return super().construct_mapping(node, deep)

    def construct_number(self, node):
        text = self.construct_scalar(node)
        if re.fullmatch(r"[-+]?(0|[1-9][\d_]{0,99})", text):
            return int(text.replace("_", ""))
        return self.construct_yaml_float(node) if re.search(r"^[^:]*[.eE][^:]*$", text) else text


Loader.add_implicit_resolver(  # 1e-3, which is text in YAML 1.1
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
for _tag in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", Loader.construct_number)
Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)


def load_yaml(text: str | TextIO) -> Any:
    """A document of YAML, or a file of one. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader)
    except (RecursionError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        raise yaml.YAMLError("it is nested too deeply" if isinstance(error, RecursionError) else error) from None


def read_file(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """The keys of a YAML file, on top of those of the file that its `base` names, relative to it.

    `above`: the files of which this one is the base. Raises UserError.
    """
    if path.is_dir():
        inside = sorted(path.glob("*.yaml"))
        remedy = f"Name a file in it, such as {inside[0]}." if inside else "Name a YAML file."
        raise UserError(f"--config {path} is a folder.", remedy)
    if not path.is_file():
        remedy = f"Correct the base in {above[-1]}." if above else "Check the path given to --config."
        raise UserError(f"The configuration file {path} does not exist.", remedy)
    if path.stat().st_size > MOST:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes.", f"A configuration file has at most {MOST:,}.")
    try:
        with path.open(encoding="utf-8") as file:
            content = load_yaml(file)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a YAML file: {reason}.", "Correct the file.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys.", "Write one `key: value` a line; --help lists the keys.")
    if BASE not in content:
        return content
    base, above = path.parent / str(content.pop(BASE)), (*above, path)
    if base.exists() and any(base.samefile(one) for one in above):
        raise UserError(f"{base} is its own base, by way of {path}.", f"Remove the `{BASE}` of one of them.")
    return _merged(read_file(base, above), content)


def _merged(below: dict, top: dict) -> dict:
    both = {key: _merged(below[key], value) for key, value in top.items() if _are_groups(below.get(key), value)}
    return {**below, **top, **both}


def _are_groups(*values) -> bool:
    return all(isinstance(value, dict) for value in values)


def check_keys(content: dict, path: Path, known: list[str], elsewhere: Callable[[str], UserError | None]) -> None:
    """Refuse unknown keys, and groups that are no groups, in the content of the file `path`. Raises UserError.

    `elsewhere`: what to say of a key that only other classes have.
    """

    def walk(node: dict, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key not in known:
                raise elsewhere(key) or UserError(
                    f"{path} sets the unknown key {key}.{nearest(key, known)}", "Correct or remove that line."
                )
            if isinstance(value, dict):
                walk(value, f"{key}.")
            elif any(other.startswith(f"{key}.") for other in known):
                shown = "nothing" if value is None else repr(value)[:80]
                raise UserError(
                    f"{path} sets {key} to {shown}, but it is a group of keys.",
                    "Write its keys below it, each indented, or remove the line.",
                )

    walk(content, "")
