"""A YAML file of a command's keys, checked before it is read."""

from collections.abc import Callable
from pathlib import Path

import yaml

from probemb.errors import UserError, nearest

BASE = "base"  # the key that names the file on which one builds


class _Loader(yaml.SafeLoader):
    """YAML without the keys that stand twice in a mapping, of which YAML takes the last."""

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
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
