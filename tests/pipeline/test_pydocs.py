from pathlib import Path

from declutr.pipeline.readers.corpus import Part, ReadFailure
from declutr.pipeline.readers.pydocs import python_parts, read_python

LONG = "It does what it says. " * 30


def part_of(path: Path) -> Part:
    size = path.stat().st_size
    return Part(format="python", path=str(path), source=path.name, start=0, stop=size, num_bytes=size, weight=size)


def test_a_module_is_its_docstring_and_its_public_definitions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        f'"""About the module. {LONG}"""\n'
        "raise SystemExit  # never run\n"
        'def shown(a, *, b=1):\n    """Shown.\n\n        Indented.\n    """\n'
        'def _hidden():\n    """Hidden."""\n'
        'class Thing:\n    """A thing."""\n    def act(self, x):\n        """Acts."""\n    def silent(self): ...\n'
    )
    (document,) = read_python(part_of(path))
    assert document.text.startswith("About the module.")
    assert document.text.endswith("shown(a, b)\nShown.\n\nIndented.\n\nThing\nA thing.\n\nThing.act(x)\nActs.")


def test_module_without_docs_is_dropped_and_other_files_fail(tmp_path):
    short, broken = tmp_path / "short.py", tmp_path / "broken.py"
    short.write_text('"""Short."""')
    broken.write_text(f'"""{LONG}"""\ndef (')
    assert list(read_python(part_of(short))) == []
    (failure,) = read_python(part_of(broken))
    assert isinstance(failure, ReadFailure)
    assert failure.reason == "invalid_python"


def test_the_machine_has_a_corpus_in_an_order_of_its_own():
    parts = python_parts()
    assert parts == python_parts()
    sources = [part.source for part in parts]
    assert len(sources) == len(set(sources)) > 500
    assert "stdlib/asyncio/base_events.py" in sources
    assert not any("/tests/" in source or "/test_" in source for source in sources)
    (topics,) = [part for part in parts if part.format == "topics"]
    texts = [record.text for record in read_python(topics)]
    assert len(texts) > 70
    assert any("assert" in text for text in texts)
