"""The loader of settings: every problem at once, with key, value and limit; YAML that is refused; settings as YAML."""

import time
from typing import Annotated, Any, Literal

import pytest
import yaml
from messages import all_of, says
from pydantic import Field, PrivateAttr, model_validator

from declutr.common.config import Strict, config_yaml, load_config
from declutr.common.config_docs import annotated_yaml, settings_tables
from declutr.common.errors import ConfigError
from declutr.common.yamlfile import MAX_BYTES, YamlError, read_yaml, read_yaml_file


class Inner(Strict):
    size: int = Field(default=4, ge=1)
    rate: float = 1e-3


class Wool(Strict):
    """The wool of a sheep, shorn once a year
    and weighed."""

    colour: Literal["white", "black"] = "white"
    """Colour after washing."""
    grams: tuple[float, ...] = (1.5, 2.0)
    """Weights, kg | pounds."""
    use: Literal["sell", "spin"] = "sell"
    """sell: at the market. spin: at home."""


class Sheep(Strict):
    """An animal with wool.

    It eats grass.
    """

    kind: Literal["sheep"] = "sheep"
    wool: Wool = Wool(colour="black")


class Horse(Strict):
    """An animal to ride."""

    kind: Literal["horse"]
    names: dict[str, str] = Field(default_factory=dict)
    """Names by language."""


class Farm(Strict):
    """A farm."""

    animal: Annotated[Sheep | Horse, Field(discriminator="kind")] = Sheep()
    hay: Wool | None = None
    """Stored hay."""
    note: str
    """A note."""
    _hidden: str = PrivateAttr("none")


class Horses(Horse):
    kind: Literal["horse", "pony"]


class Part(Strict):
    weight: float = 1.0


class Outer(Strict):
    animal: Annotated[Sheep | Horses, Field(discriminator="kind")] | None = None
    inner: Inner = Inner()
    inputs: tuple[str, ...] = ()
    name: str
    seed: int = 0
    extra: dict[str, Any] | None = None
    low: int = 0
    high: int = 10
    named: dict[str, Part] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _ordered(self):
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must be at most high = {self.high}")
        return self


@pytest.fixture
def load(tmp_path):
    def load_text(text, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(str(path), "train", Outer, overrides)

    return load_text


def problems(load, text, *overrides):
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


def test_values_are_replaced_by_overrides_and_read_back_when_printed(load):
    text = "train: {name: a, inner: {size: 2}}"
    config = load(text, "inner.rate=5e-5", "inputs=[x, y]", "name=c", "name=b", "inner.size=3")
    assert config == Outer(inner=Inner(size=3, rate=5e-5), inputs=("x", "y"), name="b")
    assert isinstance(config.inner.rate, float)
    config = load("train: {name: a, inner: {rate: 5e-5}}")
    text = "train:\n" + "".join(f"  {line}\n" for line in config_yaml(config).splitlines())
    assert load(text) == config
    assert load("train: {name: a, inner: {size: 2}}", "inner={rate: 2}").inner == Inner(rate=2)
    for text in ("train: {name: a}", "train:\n  name: a\n  inner:\n"):
        assert load(text, "inner.size=9").inner == Inner(size=9)
    # overrides of validated settings keep the kind of a section
    animal = Sheep(wool=Wool(use="spin"))
    farm = load_config(Farm(note="a", animal=animal), "train", Farm, ["note=b"])
    assert (farm, farm._hidden) == (Farm(note="b", animal=animal), "none")


def test_config_reports_every_problem_at_once(load):
    lines = problems(load, "train: {inner: {size: 0, raet: 1}, inputs: 3}", "high", "low.x=1")
    says(lines[0], "'high'", "key=value")
    keys = ["low = {'x'", "inner.size = 0", "inner.raet", "inputs = 3", "name"]
    assert sorted(line.partition(": ")[0] for line in lines[1:]) == sorted(keys)
    for facts in (("inner.size = 0", "equal to 1"), ("inner.raet", "inner.rate"), ("name", "missing", "default")):
        says(lines, facts)
    with pytest.raises(ConfigError) as error:  # also those of places
        load_config({"name": "x", "low": "x"}, "train", Outer, (), lambda values: [f"name = {values['name']}: away"])
    assert [line.partition(": ")[0] for line in error.value.problems] == ["low = 'x'", "name = x"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["inputs=[a,", "b]", "low=2"], ("inputs", "'[a,'", "YAML", "'b]'", "key=value", "quotes")),
        (["low", "=", "2"], ("'low'", "'='", "'2'", "spaces")),
        (["inputs=[d/*, *.rst,'*.md']"], """'inputs=["d/*","*.rst","*.md"]'"""),
        (["low=2", "high", "=9"], ("'high'", "'=9'", "spaces")),
        (["name=my", "folder"], ("'folder'", "key=value", "quotes")),
        (["inputs=[a", "lwo=2"], ("inputs", "'[a'", "YAML", "lwo", "unknown key", "`low`")),
        *[([text], (f"{text!r}", "key=value")) for text in ("=3", "inner.size", "")],
        (["“low=2”"], ("quotation mark (“)", "write 'low=2'")),
        (["high.x=1"], ("high.x", "holds 1", "section")),
    ],
)
def test_words_that_are_no_overrides_are_named(load, words, facts):
    """Also every part of an override that a shell cut at spaces."""
    says(" ".join(problems(load, "train: {name: a, high: 1}", *words)), facts)


def test_unknown_key_without_a_near_one_lists_the_known(load):
    first, second = problems(load, "train: {name: a, zzzzz: 1, yyyyy: 2}")
    says(first, "zzzzz", "unknown key", "animal, inner, inputs, name, seed, extra, low, high, named")
    says(second, "yyyyy", "unknown key")
    assert "animal" not in second


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("prepare.output=x", ("prepare.output", "unknown key", "known here: animal")),
        ("inner.sise=1", ("inner.sise", "unknown key", "`inner.size`")),
        ("size=1", ("size", "unknown key", "`inner.size`")),
        ("iner.size=1", ("iner.size", "unknown key", "`inner.size`")),
        ("named.one.wieght=1", ("named.one.wieght", "unknown key", "`named.one.weight`")),
        ("weight=1", ("weight", "unknown key", "`named.NAME.weight`")),
        ("named.one=5", ("named.one = 5", "section")),
        ("inner=", ("inner = None", "section", "inner.size")),
        ("train.name=", ("train.name", "unknown key", "`name`")),
        ("low=on", ("low = True", "number", "yes", "no", "on", "off")),
        ("inner.rate=.nan", ("inner.rate = nan", "finite")),
        ("inner.rate=1e308", ("inner.rate = '1e308'", "at most 1,000,000,000,000")),
        ("inner.rate=-1.0e+200", ("inner.rate = -1e+200", "at least -1,000,000,000,000")),
        ("inner.rate=1e-300", ("inner.rate = '1e-300'", "0", "at least 1e-37")),
        ("high=1" + "0" * 60, ("high = 1000000000000000000000000000000000000000...", "at most 1,000,000,000,000")),
        ("seed=1" + "0" * 40, "at most 9,223,372,036,854,775,807"),
        ("extra.deep=[{x: .inf}]", ("extra.deep.0.x = inf", "finite")),
        ("animal={kind: horse, wool: .nan}", ("animal.wool = nan", "finite")),
        ("animal={kind: horse, wool: 1}", ("animal.kind = sheep", "remove", "'animal={kind: KIND")),
        ("a." * 10_000 + "b=1", ("10,001", "at most 64")),
        ("low=010", ("low", "'010'", "YAML", "ambiguous")),
        ("inputs=[*.txt]", ("*", "quotes")),
        ("inputs=a.txt", "[a.txt]"),
        ("inputs=a,b", ("write [a,b]", "'[\"a,b\"]' for one name")),
        ("inputs=a*,b", 'write \'["a*", "b"]\''),
        ("name=12", "name='\"...\"'"),
        ("low=11", ("low = 11", "at most", "high = 10")),
        ("name=", ("name = None", "empty")),
        ("animal={legs: 4}", ("animal.kind = None", "sheep, horse, pony")),
        ("animal.kind=hors", ("animal.kind = 'hors'", "sheep, horse, pony", "`horse`")),
        ("name=!!python/name:os.system", "refused"),
    ],
)
def test_unknown_key_brings_a_suggestion(load, override, facts):
    says(problems(load, "{train: {name: a}, prepare: {unit_mib: 2, name: b}}", override), facts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [1", "not YAML"),
        ("- 1", ("top level", "prepare", "train", "list")),
        ("tarin: {}", ("prepare", "train", "'tarin'", "`train`")),
        ("name: a", ("'name'", "`train:`")),
        ("prepare: {}", "section `train`"),
        ("train: 3", ("train = 3", "section")),
        ("", "top level"),
    ],
)
def test_file_that_is_no_configuration_is_refused(load, text, message):
    for overrides in ((), ("name=a",)):
        with pytest.raises(ConfigError, match=all_of(message)):
            load(text, *overrides)


def test_name_of_no_config_file_brings_a_suggestion(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {}")
    facts = {"run.yml": f"`{tmp_path}/run.yaml`", ".": "is a folder", "low=1": ("config file", "first")}
    for name, remedy in (facts | {"nowhere.yaml": ("no such", "nowhere.yaml")}).items():
        with pytest.raises(ConfigError, match=all_of(remedy)):
            load_config(str(tmp_path / name), "train", Outer)


def test_numbers_at_the_bounds_are_accepted_and_frozen(load):
    text = "train: {name: a, seed: 9223372036854775807, high: 1000000000000, inner: {rate: 1.0e-30}, extra: {x: 0x10}}"
    config = load(text)
    assert (config.seed, config.high, config.inner.rate) == (2**63 - 1, 10**12, 1e-30)
    with pytest.raises(ValueError, match="frozen"):
        Inner().size = 3
    with pytest.raises(ConfigError, match=all_of("seed", "9,223,372,036,854,775,807")):
        load_config({"name": "a", "seed": 10**400}, "train", Outer)  # no float has it


@pytest.mark.slow
def test_thousands_of_unknown_keys_are_reported_in_seconds(load):
    """A comparison with every known key takes milliseconds, so only the first ones get advice."""
    began = time.process_time()
    lines = problems(load, "train: {name: a, " + ", ".join(f"inner{n}: 1" for n in range(3_000)) + "}")
    assert len(lines) == 3_000
    assert time.process_time() - began < 2
    says(lines[0], "`inner`")


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", ("'a'", "twice", "line 1", "line 3")),
        ("1: a\n'1': b", ("'1'", "twice")),
        ("a: 010", ("010", "ambiguous", "8")),
        ("a: 1:30", ("1:30", "ambiguous", "90")),
        ("a: 1:30.5", ("1:30.5", "ambiguous")),
        ("a: 0x_", "number"),
        ("a: " + "9" * 5000, "number"),
        ("a: !!python/object/apply:os.system [ls]", ("tag", "os.system", "refused")),
        ("a: !mine x", ("tag !mine", "refused")),
        ("a:\n\tb: 1", ("tab", "spaces", "line 2")),
        ("a: &x [*x]", ("anchor", "itself")),
        ("a: *b", "alias"),
        (LAUGHS, "more than 20,000"),
        ("[" * 66 + "]" * 66, ("nested too deeply", "64")),
        ("[" * 5000, "nested too deeply"),
        ("{a: " * 2000, "nested too deeply"),
        ("- 1\n---\n- 2", "more than one"),
        ("a: \x00", "U+0000"),
        ("a: \ud800", "U+D800"),
        ("? [a]\n: 1", "unhashable"),
        ("a: [1", "',' or ']'"),
        ("x" * (MAX_BYTES + 1), "longer than"),
        ("a: 0x" + "f" * 300, "more than 1,024"),
    ],
    ids=lambda value: value[:12],
)
def test_yaml_beyond_the_safe_subset_is_refused(text, message):
    with pytest.raises(YamlError, match=all_of(message)) as error:
        read_yaml(text)
    assert "\n" not in str(error.value)


def test_yaml_of_the_safe_subset_is_read():
    values = {"1_000": 1000, "0x1F": 31, "0": 0, "-0.5": -0.5, "=": "=", "[on, 'on', ~]": [True, "on", None]}
    values["2026-01-01"] = "2026-01-01"  # a folder, more likely than a date
    assert {text: read_yaml(f"a: {text}") for text in values} == {text: {"a": value} for text, value in values.items()}
    assert read_yaml("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}") == {"x": {"a": 1, "b": 2}, "y": {"a": 3, "b": 2}}
    assert read_yaml("") is None
    assert read_yaml("[" * 64 + "]" * 64)
    assert len(read_yaml("- a\n" * 19_999)) == 19_999


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"a: 1\nb: \xe9\n", ("UTF-8", "0xe9", "line 2")),
        ("a: 1\n".encode("utf-16"), ("UTF-8", "0xff", "line 1")),
        (b"#" * (MAX_BYTES + 1), "longer than"),
    ],
)
def test_yaml_file_that_is_no_text_is_refused(tmp_path, raw, message):
    (tmp_path / "x.yaml").write_bytes(raw)
    with pytest.raises(YamlError, match=all_of(message)):
        read_yaml_file(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(str(tmp_path / "x.yaml"), "train", Outer)
    (tmp_path / "x.yaml").write_bytes("a: é\n".encode("utf-8-sig"))
    assert read_yaml_file(tmp_path / "x.yaml") == {"a": "é"}, "a byte order mark is passed over"


def test_reading_ends_at_the_bound():
    began = time.process_time()
    with pytest.raises(YamlError, match=all_of("more than 20,000")):
        read_yaml("- a\n" * (MAX_BYTES // 4))
    assert time.process_time() - began < 5


FARM = """\
# An animal with wool. One of sheep, horse.
animal:
  kind: sheep
  # The wool of a sheep, shorn once a year and weighed.
  wool:
    # Colour after washing. One of white, black.
    colour: black
    # Weights, kg | pounds.
    grams: [1.5, 2.0]
    # sell: at the market. spin: at home.
    use: sell
# Stored hay.
hay: null
# A note.
note: a
"""


def test_yaml_holds_every_setting_with_its_meaning_and_odd_values_read_back():
    assert annotated_yaml(Farm(note="a")) == FARM
    assert any("kg \\| pounds" in line for line in settings_tables(Farm, "farm"))
    names = {"en": "# no comment", "a b: c": "two\nlines\n\n", "é": "x" * 300}
    for farm in (Farm(note="- a\n  b", animal=Horse(kind="horse", names=names)), Farm(note="", hay=Wool(grams=()))):
        assert Farm.model_validate(yaml.safe_load(annotated_yaml(farm))) == farm
