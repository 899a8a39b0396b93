"""A YAML file of a command's keys, checked before it is read."""

from collections.abc import Callable
from pathlib import Path

import yaml

from probemb.errors import UserError, nearest


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


def checked_file(path: Path, known: list[str], elsewhere: Callable[[str], UserError | None]) -> str:
    """The path; or its content as YAML, without keys of other classes that have no value there (earlier versions)."""
    if path.is_dir():
        inside = sorted(path.glob("*.yaml"))
        remedy = f"Name a file in it, such as {inside[0]}." if inside else "Name a YAML file."
        raise UserError(f"--config {path} is a folder.", remedy)
    if not path.is_file():
        raise UserError(f"The configuration file {path} does not exist.", "Check the path given to --config.")
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a YAML file: {reason}.", "Correct the file.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys.", "Write one `key: value` a line; --help lists the keys.")
    left_out: list[str] = []

    def walk(node: dict, prefix: str) -> None:
        for name, value in list(node.items()):
            key = f"{prefix}{name}"
            if key not in known:
                error = elsewhere(key)
                if error is None or value is not None:
                    raise error or UserError(
                        f"{path} sets the unknown key {key}.{nearest(key, known)}", "Correct or remove that line."
                    )
                left_out.append(key)
                del node[name]
            elif not isinstance(value, dict) and any(other.startswith(f"{key}.") for other in known):
                shown = "nothing" if value is None else repr(value)[:80]
                raise UserError(
                    f"{path} sets {key} to {shown}, but it is a group of keys.",
                    "Write its keys below it, each indented, or remove the line.",
                )
            elif isinstance(value, dict):
                walk(value, f"{key}.")
                if not value:  # a class without options
                    left_out.append(key)
                    del node[name]

    walk(content, "")
    return yaml.safe_dump(content) if left_out else str(path)
