"""The reading lists of docs/why/architecture.md, compared with the files whose functions run."""

import re
import sys
from pathlib import Path

from preparing import config_of, write_jsonl
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step

from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def reading_list(title):
    text = (ROOT / "docs/why/architecture.md").read_text().split(f"\n### {title}\n")[1].split("\n#")[0]
    numbered = re.findall(r"^\d+\. `(.+?)`: \w", text, re.MULTILINE)
    return numbered, set(re.findall(r"`([\w/]+\.py)`", text)) - set(numbered)


def files_run(call, *arguments):
    """The result of a call, and the files of source whose functions ran in it."""
    names, before = set(), sys.getprofile()
    silent = ("<module>", "model_post_init")  # imports, and what pydantic calls whenever settings are read
    sys.setprofile(lambda frame, *_: frame.f_code.co_name not in silent and names.add(frame.f_code.co_filename))
    try:
        result = call(*arguments)
    finally:
        sys.setprofile(before)
    paths = [Path(name).resolve() for name in names]
    files = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    return result, {name for name in files if name.split("/")[0] in ("src", "pipeline", "trainer")}


def test_the_list_of_a_step_names_the_files_that_run():
    collator, train_step = tiny_collator(), tiny_train_step(tiny_encoder())
    batch, collated = files_run(rank_batch, collator, documents([60, 70, 80], 12))
    _, stepped = files_run(train_step.step, {"": batch}, 1)
    numbered, others = reading_list("A step, from rows of the shards to the update")
    assert len(numbered) <= 18
    assert (sorted(numbered), others) == (sorted(collated | stepped), set())


def test_the_list_of_a_unit_names_the_files_that_run(tmp_path):
    texts = [" ".join(f"word{number} {place}" for place in range(30)) for number in range(4)]
    file = write_jsonl(tmp_path / "corpus.jsonl", *[{"text": text} for text in texts])
    config = config_of(file, tmp_path / "out", duplicates={"exact": False}, validation_fraction=0.01)
    tokenizer = train_tokenizer(iter(texts), 300)
    tokenizer.save_pretrained(str(tmp_path / "out" / "tokenizer"))
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    sidecar, ran = files_run(write_unit, unit, tmp_path / "out", config, describe_tokenizer(tokenizer, "train"))
    assert sidecar.counts.kept == 4
    numbered, others = reading_list("A unit, from its input to its shards")
    assert len(numbered) <= 16
    assert (sorted(numbered), others) == (sorted(ran), set())
