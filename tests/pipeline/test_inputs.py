"""Corpora that lie elsewhere: an object store, the Hub, any protocol of fsspec. Real servers on this machine."""

import gzip
import io
import json
from http.server import SimpleHTTPRequestHandler
from unittest.mock import Mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import files, outcomes, read_all, tar, write_table
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem
from hubserver import SHA, hub_server
from mediafiles import spread
from messages import all_of, says
from processes import run_python
from s3server import faulty_store, s3_server
from serving import Handler, serving

from declutr.common.stores.address import files_below, filesystem
from declutr.common.stores.folder import Folder
from declutr.pipeline.job.units import UnitReader, check_unchanged, hash_unit, plan_units, with_file_states
from declutr.pipeline.media.media_rows import labelled
from declutr.pipeline.readers.corpus import Blob, HubCorpus, ReadFailure, bare_suffix
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.streams import CHUNK_BYTES, open_input, stream_of

LINES = b"".join(json.dumps({"text": f"line {n}"}).encode() + b"\n" for n in range(100))


def parquet(texts=(), **columns):
    target = io.BytesIO()
    pq.write_table(pa.table(columns or {"text": texts, "n": range(len(texts))}), target, row_group_size=2)
    return target.getvalue()


CONTENTS = {"data/a.jsonl": LINES, "data/b.jsonl.gz": gzip.compress(LINES), "data/c d.parquet": parquet(list("pqr"))}
CONTENTS |= {"data/deep/e.tar": tar([("x.txt", b"in a tar"), ("../y.txt", b"")])}
CONTENTS |= {"data/.hidden/f.txt": b"hidden", "data/readme.log": b"not a document"}
READ = [(name, f"line {n}") for name in ("a.jsonl", "b.jsonl.gz") for n in range(100)]
READ += [("c d.parquet", letter) for letter in "pqr"]
READ += [("deep/e.tar!x.txt", "in a tar"), ("deep/e.tar!../y.txt", "unsafe_name")]


@pytest.fixture(scope="module")
def bucket():
    """Address of a bucket on an S3 server of this machine, and the options that follow it."""
    with s3_server() as address:
        for name, data in CONTENTS.items():
            Folder(address("")).put(name, data)
        root, _, query = address("").partition("/?")
        yield root, f"?{query}"


@pytest.mark.parametrize("unit_mib", [64.0, 0.001])
def test_a_folder_of_an_object_store_reads_like_one_of_this_machine(bucket, tmp_path, unit_mib):
    root, query = bucket
    spread(tmp_path, CONTENTS)
    (tmp_path / "data/loop").symlink_to(tmp_path)
    corpora = files(f"{root}/data{query}"), files(tmp_path / "data"), files(f"file://{tmp_path}/data")
    assert [outcomes(read_all(corpus, unit_mib)) for corpus in corpora] == [READ] * 3
    there, *here = ([hash_unit(unit) for unit in plan_units(corpus, unit_mib)[0]] for corpus in corpora)
    assert here == [there, there], "a unit does not depend on where the files lie"


def test_globs_and_single_files_of_a_store_are_read_and_missing_ones_named(bucket):
    root, query = bucket
    for place, rows in (("*.parquet", READ[200:203]), ("**/*.tar", READ[203:]), ("a.jsonl", READ[:100])):
        assert outcomes(read_all(files(f"{root}/data/{place}{query}"))) == rows
    missing = [f"{root}/nothing{query}", f"{root}/data/*.csv{query}", f"s3://no-such-bucket/x{query}", "nosuch://x/y"]
    problems = file_parts(files(*missing), 1 << 20)[1]
    assert all(path in problem for path, problem in zip(missing, problems, strict=True))
    says(problems, "s3://no-such-bucket/x", "matches no file", "check the address")
    for name in ("a.jsonl", "b/b.jsonl", "c/c.jsonl"):
        Folder(f"{root}/three{query}").put(name, b'{"text": "one"}')
    for place, names in {"": "abc", "/*/*.jsonl": "bc", "/**/*.jsonl": "abc", "/b/*": "b", "/none/*": ""}.items():
        units, problems = plan_units(files(f"{root}/three{place}{query}"), None)
        assert "".join(part.source[-7] for unit in units for part in unit.parts) == names, place
        assert len(problems) == (not names)


def test_inputs_of_any_fsspec_protocol_are_read_and_an_arrow_file_there_is_one_part(tmp_path):
    memory = fsspec.filesystem("memory")
    for name, data in CONTENTS.items():
        memory.pipe(f"/place/{name}", data)
    assert outcomes(read_all(files("memory://place/data"), 0.001)) == READ
    write_table(tmp_path / "a.arrow", pa.table({"text": list("abcde")}), 2)
    memory.pipe("/table/a.arrow", (tmp_path / "a.arrow").read_bytes())
    for corpus, number in ((files(tmp_path / "a.arrow"), 3), (files("memory://table/a.arrow"), 1)):
        assert len(file_parts(corpus, 1)[0]) == number
        assert outcomes(read_all(corpus, 1e-6)) == [("a.arrow", letter) for letter in "abcde"]


HUB = """
import json, sys
from corpora import outcomes, read_all
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.readers.corpus import HubCorpus
from declutr.pipeline.readers.planning import file_parts
for settings in json.loads(sys.argv[1]):
    content = settings.pop("content", None)
    corpus = HubCorpus(kind="hub", **settings)
    if content is None:
        print(json.dumps(file_parts(corpus, 1 << 20)[1] or outcomes(read_all(corpus, 0.0001))))
        continue
    config = PipelineConfig.model_validate({"output": "o", "corpus": corpus.model_dump(), "content": content,
        "tokenizer": {"kind": "train", "vocab_size": 300}})
    units, problems = plan_units(corpus, 32, None, config.content)
    records = [] if problems else [record for unit in units for record in UnitReader(unit, corpus, config.content)]
    print(json.dumps(problems or [[r.texts, r.labels] if hasattr(r, "texts") else r.reason for r in records]))
"""

PLAIN = {"train-00000-of-00002": "abc", "train-00001-of-00002": "d", "test-00000-of-00001": "t"}
DECLARED = [{"config_name": "en", "data_files": [{"split": "train", "path": "en/*.json.gz"}], "default": True}]
DECLARED += [{"config_name": "de", "data_files": [{"split": "train", "path": ["de/a.jsonl"]}]}]
DECLARED += [{"config_name": "in", "data_dir": "de", "data_files": "**/*.jsonl"}]  # `**` is no folder, too
NLI = {"premise": list("abaa"), "hypothesis": list("xyz?"), "label": [0, 1, 2, -1]}
DATASETS = {
    "owner/plain": {
        "main": {"README.md": b"", "plain.py": b"raise SystemExit('a script was run')"}
        | {f"data/{name}.parquet": parquet(list(texts)) for name, texts in PLAIN.items()}
    },
    "owner/declared": {
        "card": {"configs": DECLARED},
        "main": {"en/x.json.gz": gzip.compress(b'{"text": "english"}\n'), "de/a.jsonl": b'{"text": "deutsch"}\n'},
    },
    "owner/nli": {"main": {"data/train-00000-of-00001.parquet": parquet(**NLI)}},
    "owner/script": {
        "main": {"script.py": b"", "README.md": b""},
        "refs/convert/parquet": {
            f"default/{split}/0000.parquet": parquet([text]) for split, text in (("train", "converted"), ("test", "t"))
        },
    },
}


@pytest.mark.slow
def test_datasets_of_the_hub_are_read_at_their_commit_without_their_scripts(tmp_path):
    queries = [{"name": "owner/plain"}, {"name": "owner/plain", "split": "test", "revision": "main"}]
    queries += [{"name": "owner/declared"}, {"name": "owner/declared", "config": "de"}]
    queries += [{"name": "owner/declared", "config": "in"}, {"name": "owner/script"}]
    queries += [{"name": "owner/declared", "config": "fr"}, {"name": "owner/script", "split": "dev"}]
    queries += [{"name": "owner/nothing"}, {"name": "owner/plain", "revision": "v9"}]
    queries += [{"name": "owner/plain", "text_field": "body"}, {"name": "owner/script", "revision": "main"}]
    queries += [{"name": "owner/nli", "content": {"kind": "pairs", "premise": "sentence1"}}]
    queries += [{"name": "owner/nli", "content": "pairs"}]
    with hub_server(DATASETS) as address:
        home = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
        ran = run_python("-c", HUB, json.dumps(queries), env=home | {"HF_HUB_OFFLINE": None})
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    train = [f"owner/plain@{SHA[:12]}/data/train-0000{n}-of-00002.parquet" for n in (0, 1)]
    assert answers[0] == [[train[0], "a"], [train[0], "b"], [train[0], "c"], [train[1], "d"]]
    assert [[text for _, text in answer] for answer in answers[1:6]] == [
        *(["t"], ["english"], ["deutsch"], ["deutsch"], ["converted"])
    ]
    assert answers.pop() == ["no_gold_label", [["a", "x", "z"], [-1, 0, 2]], [["b", "y"], [-1, 1]]], "by premise"
    wrong = ["fr", "dev", "owner/nothing", " ", "body", "corpus.revision", "hypothesis, label, premise"]
    for word, problems in zip(wrong, answers[6:], strict=True):
        assert word in " ".join(problems), "problems are texts"
    assert "['de', 'en', 'in']" in answers[6][0]


def test_a_remote_file_is_read_to_the_end_of_its_part_and_not_much_further():

    address, line, stop = "memory://long/a.txt", b"x" * 99 + b"\n", 3 * CHUNK_BYTES
    fsspec.filesystem("memory").pipe("/long/a.txt", line * 200_000)
    with open_input(address) as file:
        stream = stream_of(file, address, CHUNK_BYTES, stop)
        assert (stream.peek(10), file.tell()) == ((line * 2)[76:86], 2 * CHUNK_BYTES)
        read = b"".join(iter(lambda: stream.read(1000) if stream.position < stop else b"", b""))
        assert (read, file.tell()) == ((line * 200_000)[CHUNK_BYTES : CHUNK_BYTES + len(read)], stop)
        assert len(stream.read(200)) == 200
        assert file.tell() <= stop + CHUNK_BYTES


class _Ending(MemoryFileSystem):
    """A store that refuses to read objects named b, as after the end of credentials."""

    protocol = "ending"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("ending://", "memory://"))

    def _open(self, path, *given, **named):
        file = super()._open(path, *given, **named)
        if path.endswith("b.jsonl"):
            file.read = Mock(side_effect=OSError("ExpiredToken"))
        return file


def test_a_store_that_ends_is_no_failure_of_its_files():
    fsspec.register_implementation("ending", _Ending, clobber=True)
    for name in "ab":
        fsspec.filesystem("memory").pipe(f"/corpus/{name}.jsonl", b'{"text": "one"}\n' * 3)
    corpus = files("ending://corpus/a.jsonl")
    (unit,), _ = plan_units(corpus, None)
    assert len(list(UnitReader(unit, corpus))) == 3

    def named(name):
        parts = [part.model_copy(update={"path": part.path.replace("a.jsonl", name)}) for part in unit.parts]
        return unit.model_copy(update={"parts": parts})

    with pytest.raises(OSError, match="ExpiredToken"):
        list(UnitReader(named("b.jsonl"), corpus))
    assert [type(one) for one in UnitReader(named("c.jsonl"), corpus)] == [ReadFailure]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_an_outage_while_inputs_are_read_is_waited_for(method):
    with faulty_store() as (address, faults):
        Folder(address("")).put("a.jsonl", LINES)
        Folder(address("")).put("b.jsonl", LINES)
        faults.refuse(403, "AccessDenied", methods=("HEAD",))
        (problem,) = file_parts(files(address("*.jsonl")), 1 << 20)[1]  # not one for each file
        says(problem, "corpus.paths", "a.jsonl", "Check the credentials")
        faults.clear()
        corpus = files(address("a.jsonl"))
        (unit,) = with_file_states(plan_units(corpus, None)[0], 30)
        faults.refuse(409, "Conflict", left=1, methods=(method,))  # the library does not retry this error
        assert len(list(UnitReader(unit, corpus))) == 100
        assert faults.left == 0
        faults.refuse(409, "Conflict", left=1, methods=("HEAD",))
        check_unchanged(unit)
        faults.refuse(409, "Conflict", methods=(method,))
        with pytest.raises(OSError, match=all_of("bucket/a.jsonl", "has not answered")):
            list(UnitReader(unit.model_copy(update={"retry_seconds": 0.1}), corpus))


@pytest.mark.parametrize("names", [("a.txt", "z.txt"), ("z.txt", "a.txt")])
def test_of_a_file_and_a_link_the_first_name_counts(tmp_path, names):
    (tmp_path / names[0]).write_text("one line\n")
    (tmp_path / names[1]).symlink_to(tmp_path / names[0])
    units, _ = plan_units(files(tmp_path), None)
    assert [part.source for unit in units for part in unit.parts] == ["a.txt"]


def test_names_of_datasets_are_checked_and_those_of_files_may_hold_a_hash_or_an_exclamation_mark():
    with pytest.raises(ValueError, match="name"):
        HubCorpus(kind="hub", name="https://huggingface.co/datasets/x")
    _, place, query = filesystem("s3://bucket/C#/a.jsonl?endpoint_override=http://127.0.0.1:9")
    assert (place, query) == ("bucket/C#/a.jsonl", "endpoint_override=http://127.0.0.1:9")
    names = {"mail.tar!0001": "", "a.tar!b/c.jsonl.gz": ".jsonl", "wow!.txt": ".txt", "a.tgz!README": "", "x!": ""}
    assert {name: bare_suffix(name) for name in names} == names
    labels = {"Godspeed You! Black Emperor/a.wav": "Godspeed You! Black Emperor"}
    labels |= {f"x/pets.{packed}!dog/hey!.wav": "dog" for packed in ("tar", "tbz2", "tzst", "bgz")}
    assert {source: labelled(Blob("", source, 0, b"", None), "folder").label for source in labels} == labels


def test_odd_keys_of_a_store_are_read_or_refused_by_name():
    import boto3

    good = ("b[1].jsonl", "marker/", "marker/a.jsonl", "p%20q#r.jsonl")
    with s3_server() as address:
        client = boto3.client("s3", endpoint_url=address("").partition("endpoint_override=")[2])
        for key in (*(f"good/{name}" for name in good), "slash//x.jsonl", "query/a?b.jsonl"):
            body = b"" if key.endswith("/") else b'{"text": "x"}'
            client.put_object(Bucket="bucket", Key=key, Body=body)
        assert [source for source, _ in outcomes(read_all(files(address("good"))))] == [good[0], *good[2:]]
        assert len(read_all(files(address("good/b[1].jsonl")))) == 1
        for folder, why in (("slash", "//"), ("query", "?")):
            says(*plan_units(files(address(folder)), None)[1], why, "rename")


def test_a_server_that_tells_no_size_and_a_store_that_refuses_to_list_end_the_search(tmp_path):
    class Silent(Handler):
        def do_HEAD(self):
            self.send_response(200)
            self.end_headers()

        do_GET = do_HEAD

    with serving(Silent) as host:
        says(*plan_units(files(f"http://{host}/a.jsonl"), None)[1], "Content-Length", "download")

    class Pages(SimpleHTTPRequestHandler):
        unsent, log_message = "", Handler.log_message

        def __init__(self, *given):
            super().__init__(*given, directory=tmp_path)

        def send_header(self, key, value):
            if key != self.unsent:
                super().send_header(key, value)

    spread(tmp_path, {f"{name}.jsonl": b'{"text": "x"}' for name in "ba"})
    with serving(Pages) as host:
        assert outcomes(read_all(files(f"http://{host}/*.jsonl"))) == [("a.jsonl", "x"), ("b.jsonl", "x")]
        Pages.unsent = "Content-Length"
        says(*plan_units(files(f"http://{host}/*.jsonl"), None)[1], "a.jsonl", "Content-Length", "download")

    class Refusing(ArrowFSWrapper):
        def ls(self, path, detail=False, **more):
            if path.endswith("/b"):
                raise PermissionError("SLOW_DOWN")
            return super().ls(path, detail, **more)

    (tmp_path / "b").mkdir()
    with pytest.raises(PermissionError):
        files_below(Refusing(pa.fs.LocalFileSystem()), str(tmp_path))
