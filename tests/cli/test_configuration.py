"""Configurations: dataclasses from YAML and options, ranges, and options of a chosen class."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pytest
import yaml
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

from probemb.cli.configuration import chosen_options, parse_config
from probemb.cli.ranges import BelowOne, Distance, Seed
from probemb.distances import DISTANCES
from probemb.errors import UserError
from probemb.options import resolved, to_yaml


@dataclass(frozen=True)
class Part:
    rate: float = 0.5
    sizes: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class One:
    rate: PositiveFloat = 1.0


@dataclass(frozen=True)
class Other:
    size: PositiveInt = 2


@dataclass(frozen=True)
class Bare:
    pass


@dataclass(frozen=True)
class Whole:
    name: str = "x"
    deep_switch: bool = False
    note: str | None = "n"
    part: Part = field(default_factory=Part)
    share: ClosedUnitInterval | None = None
    seed: Seed = 0
    pair: tuple[BelowOne, BelowOne] = (0.5, 0.5)
    shares: Literal["all"] | dict[str, NonNegativeFloat] = "all"
    distance: Distance = "csd"
    kind: str = "a"
    options: Any = field(**chosen_options("kind", {"a": One, "b": Other, "c": Bare}, "a"))


def parse(*argv: str) -> Whole:
    return parse_config(Whole, "prog", "description", argv)


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("name: y\npart:\n  rate: 0.25\n")
    assert parse("--config", str(file)) == Whole("y", part=Part(0.25))
    assert parse("--config", str(file), "--part.rate", "1") == Whole("y", part=Part(1.0))
    file.write_text("name: 1:20\nseed: 010\n")  # 80 and 8 to YAML 1.1
    assert parse("--config", str(file)) == Whole("1:20", seed=10)
    assert parse("--part.sizes", "[3,4]").part.sizes == parse("--part.sizes", "3", "4").part.sizes == (3, 4)


def test_hyphens_and_bare_switches():
    assert parse("--deep_switch", "--name", "z") == Whole("z", True)
    assert not parse("--deep-switch", "false").deep_switch
    assert not parse("--deep-switch", "--no-deep-switch").deep_switch
    assert parse("--no-note").note is None
    assert parse("--note=").note is parse("--note", "").note is None


def test_the_resolved_configuration_reads_back(tmp_path):
    config = Whole("ü", True, "m", Part(1e-5, (5, 6)))
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse("--config", str(file)) == config


def test_a_value_that_is_a_mapping(tmp_path):
    base, file = tmp_path / "base.yaml", tmp_path / "c.yaml"
    base.write_text("shares: {a.b: 1}\n")
    file.write_text("base: base.yaml\nshares: {c: 0.5, a.b.d: 2}\n")  # as a whole, in place of the other
    config = parse("--config", str(file))
    assert list(config.shares.items()) == [("c", 0.5), ("a.b.d", 2.0)]
    file.write_text(to_yaml(config))
    assert parse("--config", str(file)) == parse("--shares", "{c: 0.5, a.b.d: 2}") == config
    assert parse("--config", str(file), "--shares", "all").shares == "all"
    with pytest.raises(UserError, match=r"It takes all or \{name: a number of at least 0, …\}"):
        parse("--shares", "{a: -1}")


def test_all_unknown_keys_and_wrong_values_are_told_at_once(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("part:\n  rates: 1\nkind: b\noptions: {rate: 2}\n")
    with pytest.raises(UserError) as error:
        parse("--config", str(file), "--share", "2", "--nam", "y", "--pair", "0.5", "--seed", "--distance=cds")
    for told in (
        f"{file} sets the unknown key part.rates. Did you mean 'part.rate'?",
        "The kind b does not use options.rate. Leave it out, or choose one of a.",
        "There is no option --nam. Did you mean '--name'?",
        "share is '2'. It takes a number of at least 0 and at most 1.",
        "pair is '0.5'. It takes a list, each a number of at least 0 and below 1 (1 2",
        "--seed has no value.",
        "distance is 'cds'. Did you mean 'csd'?",
    ):
        assert told in error.value.what
    file.write_text("part: [")
    with pytest.raises(UserError, match=r"c\.yaml cannot be read: while parsing"):
        parse("--config", str(file))


def test_another_field_chooses_the_options(tmp_path):
    assert parse().options == One(1.0)
    assert parse("--options.size", "3", "--kind", "b").options == Other(3)
    file = tmp_path / "c.yaml"
    for kind, options in {"a": One(0.5), "b": Other(5), "c": Bare()}.items():
        file.write_text(to_yaml(Whole(kind=kind, options=options)))
        assert parse("--config", str(file)) == Whole(kind=kind, options=options)


def test_options_of_another_class_come_from_no_file_that_names_that_class(tmp_path, capsys):
    named, plain = tmp_path / "named.yaml", tmp_path / "plain.yaml"
    named.write_text("kind: a\nname: y\noptions: {rate: 3}\n")
    plain.write_text("options: {rate: 3}\n")
    assert parse("--config", str(named), "--kind", "b") == Whole(name="y", kind="b", options=Other())
    assert capsys.readouterr().err == f"config  kind b leaves out what {named} sets for a: options.rate\n"
    assert parse("--config", str(named), "--config", str(plain)).options == One(3.0)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"^The kind b does not use options\.rate\."):
        parse("--config", str(plain), "--kind", "b")


def test_a_file_builds_on_another(tmp_path):
    base, file, last = tmp_path / "base.yaml", tmp_path / "sub/file.yaml", tmp_path / "sub/last.yaml"
    file.parent.mkdir()
    base.write_text("name: y\nkind: b\npart: {rate: 1e-4, sizes: [3, 4]}\noptions: {size: 7}\n")
    file.write_text("base: ../base.yaml\npart: {rate: 3}\n")
    last.write_text("base: file.yaml\nname: z\n")
    whole = parse("--config", str(last))
    assert (whole.name, whole.part, whole.options) == ("z", Part(3.0, (3, 4)), Other(7))
    assert parse("--config", str(base)).part.rate == 1e-4


def test_distances_of_the_command_line_are_those_of_the_library():
    assert set(get_args(Distance)) == {*DISTANCES, "match-probability"}


def test_a_written_configuration_holds_in_every_folder(tmp_path, monkeypatch):
    """Paths become absolute; addresses, tags and hub names stay."""
    from pretrain.config import Config, Data, Evaluate, Model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocabulary.txt").write_text("")
    data = Data(train=["data/{000..003}.tar", "https://host/data", "pipe:cat x.tar"])
    model, sets = Model(pretrained="openai", vocabulary="vocabulary.txt"), Evaluate(pairs=["a=x", "data/b=c"])
    config = Config(out="runs/x", data=data, model=model, evaluate=sets)
    found = resolved(config)
    assert found["out"] == str(tmp_path / "runs" / "x")
    assert found["data"]["train"] == [str(tmp_path / "data" / "{000..003}.tar"), "https://host/data", "pipe:cat x.tar"]
    assert found["model"]["pretrained"] == "openai"
    assert found["model"]["vocabulary"] == str(tmp_path / "vocabulary.txt")
    assert found["evaluate"]["classes"] is None
    assert found["evaluate"]["pairs"] == [f"a={tmp_path}/x", f"{tmp_path}/data/b=c"]
    assert yaml.safe_load(to_yaml(config)) == found
