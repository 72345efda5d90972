"""YAML that is refused: what would be read otherwise than a person reads it, and what would do harm."""

import time

import pytest
from messages import all_of

from declutr.common.yamlfile import MAX_BYTES, YamlError, read_yaml, read_yaml_file

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", ("'a'", "twice", "line 1", "line 3")),
        ("a: {b: 1, b: 1}", ("'b'", "twice")),
        ("1: a\n'1': b", ("'1'", "twice")),
        ("a: 010", ("010", "ambiguous", "8")),
        ("a: 1:30", ("1:30", "ambiguous", "90")),
        ("a: 1:30.5", ("1:30.5", "ambiguous")),
        ("a: 0x_", "number"),
        ("a: " + "9" * 5000, "number"),
        ("a: !!python/object/apply:os.system [ls]", ("tag", "os.system", "refused")),
        ("a: !!binary x", ("tag", "binary", "refused")),
        ("a: !mine x", ("tag !mine", "refused")),
        ("a:\n\tb: 1", ("tab", "spaces", "line 2")),
        ("a: &x [*x]", ("anchor", "itself")),
        ("a: *b", "alias"),
        (LAUGHS, "more than 20,000"),
        ("[" * 5000, "nested too deeply"),
        ("{a: " * 2000, "nested too deeply"),
        ("- 1\n---\n- 2", "more than one"),
        ("a: \x00", "U+0000"),
        ("a: \ud800", "U+D800"),
        ("? [a]\n: 1", "unhashable"),
        ("a: [1", "',' or ']'"),
        ("x" * (MAX_BYTES + 1), "longer than"),
        ("{a: " * 65 + "1" + "}" * 65, ("nested", "at most 64")),
        ("a: 0x" + "f" * 300, "more than 1,024"),
    ],
    ids=lambda value: value[:12],
)
def test_yaml_beyond_the_safe_subset_is_refused(text, message):
    with pytest.raises(YamlError, match=all_of(message)) as error:
        read_yaml(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1_000", {"a": 1000}),
        ("a: 0x1F", {"a": 31}),
        ("a: 0", {"a": 0}),
        ("a: -0.5", {"a": -0.5}),
        ("a: 2026-01-01", {"a": "2026-01-01"}),  # a folder, more likely than a date
        ("a: =", {"a": "="}),
        ("a: [on, 'on', ~]", {"a": [True, "on", None]}),
        ("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}", {"x": {"a": 1, "b": 2}, "y": {"a": 3, "b": 2}}),
    ],
)
def test_yaml_of_the_safe_subset_is_read(text, value):
    assert read_yaml(text) == value


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


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "x.yaml").write_bytes("a: é\n".encode("utf-8-sig"))
    assert read_yaml_file(tmp_path / "x.yaml") == {"a": "é"}


def test_reading_ends_at_the_bounds():
    """A mebibyte of list took 13 s: it was read whole before its values were counted."""
    began = time.process_time()
    with pytest.raises(YamlError, match=all_of("more than 20,000")):
        read_yaml("- a\n" * (MAX_BYTES // 4))
    assert time.process_time() - began < 3
    assert read_yaml("[" * 64 + "]" * 64)
    assert len(read_yaml("- a\n" * 19_999)) == 19_999
