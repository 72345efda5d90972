"""Commands used wrongly: each ends with one message, a status that is not 0, and nothing created or deleted."""

import json
import logging
import socket
import subprocess
import sys

import pytest
import ray
import tinyruns as runs
import yaml
from processes import run_python

from declutr.cli.main import main
from declutr.common.lock import RunLock

TRAIN = {"run": "r", "data": "d", "encoder": {"from_config": {"model_type": "roberta"}}}
PREPARE = {"output": "o", "corpus": {"kind": "files", "paths": ["docs"]}}
PREPARE |= {"tokenizer": {"kind": "train", "vocab_size": 300}, "geometry": {"num_anchors": 1, "max_tokens": 4}}
FILES = {
    "good.yaml": yaml.safe_dump({"train": TRAIN, "prepare": PREPARE}),
    "section.yaml": "prepare: {}", "empty.yaml": "", "twice.yaml": "train: {run: r}\ntrain: {run: s}",
    "odd.yaml": "train: {1: 2, ~: 3}", "file.txt": "some text", "odd.zzz": "text", "table.csv": "id,txet\n1,a\n",
    "docs/a.txt": "a b c d e f g h\n" * 20,
    "tables/a.csv": "a\n1\n", "tables/b.csv": "a\n1\n", "tables/c.csv": "a\n1\n",
    "shards/manifest.json": "{}", "cut/manifest.json": '{"a',
    "point/state.json": "[]", "export/declutr.json": "{}", "index/index.json": "[]", "model/modules.json": "[]",
    "run/checkpoints/step-00000004/x": "", "a\nb é/x": "", "void.jsonl": "", "pairs.csv": "query,text\na,b\n",
    "pointer/config.json": "version https://git-lfs.github.com/spec/v1", "list.json": "[\n1]",
    "rows.jsonl": '{"text": "a"}\n' * 2,
    "shards/ledger/0": "",
}  # fmt: skip
CONFIGS = [
    ("nowhere.yaml", "no such config file"), ("docs", "is a folder"), ("", "is a folder"),
    ("x" * 300, "no such config file"), ("odd.yaml", "Keys should be strings"),
    ("section.yaml", "has no section `train`"),
]  # fmt: skip
SETTINGS = [
    (["run=file.txt"], "is a file; name a folder"), (["run=$NOT_SET/x"], "$NOT_SET is not set"),
    (["run=shards"], "holds prepared shards"), (["run=point"], "holds a checkpoint"),
    (["run=docs"], "not a run; name a new folder"), (["data=none"], ("data = none", "run `prepare`")),
    (["data=file.txt"], "is a file; name the folder of the shards"), (["run=s3://"], "run = s3://: names no bucket"),
    (["data=shards"], "is not a manifest of this version"), (["data=cut"], ("Invalid JSON", "restore it, or prep")),
    (["encoder={pretrained: ./none}"], "no such folder; looked at"),
    (["encoder={pretrained: docs}"], ("encoder.pretrained = docs: is no encoder", "no config.json")),
    (["optim.lrr=1", "steps=yes", "run=file.txt"],
     ("did you mean `optim.lr`?", "steps = True: a number is needed", "is a file; name a folder")),
    (["optim.betas=[2, -1]"], "optim.betas.1 = -1"), (["scaling.device=gpu"], "did you mean `cuda`?"),
    (["objective.masking.mlm_probability=2"], "objective.masking.mlm_probability = 2"),
    (["validation.score=recal_at_1"], ("validation.score = 'recal_at_1'", "distant_recall_at_1", "`recall_at_1`")),
    (["batch_size=8"], "batch_size: unknown key; did you mean `batch_documents`?"),
    (["learning_rate=1e-3"], "did you mean `optim.lr`?"), (["seed=1" + "0" * 4000], "it has more than 1,024 bits"),
    (["objective.temperature=.nan"],
     ("objective.temperature = nan: must be a finite number", "it needs objective.kind = simcse or scd or")),
    (["--stesp", "4"], "unrecognized arguments"), (["spans={min_tokens: 9, max_tokens: 4}"], "- spans.min_tokens = 9"),
    (["encoder.pretrained=x"], ("encoder: give exactly one of `pretrained`", "encoder.from_config=null")),
    (["scaling.num_workers=-1"], "scaling.num_workers = -1: Input should be greater than or equal to 0\n"),
]  # fmt: skip
PLACES = ["nowhere", "file.txt", "docs", "link", "", "$NOT_SET", "~no-such-user", "x" * 300, "a\0b", "shards", "cut"]
PLACES += ["point", "export", "index", "run", "a\nb é", "s3://bucket/x"]
COMMANDS = {
    "inspect": [], "why": ["--step", "1"], "report": [], "index": ["--output", "out"], "search": ["a query"],
    "embed": ["file.txt", "--output", "out.npy"], "export": ["--to", "onnx", "--output", "out"],
}  # fmt: skip
OTHERS = [
    (["tran"], "there is no command 'tran'; did you mean `train`?"), (["--verson"], "did you mean `--version`?"),
    (["prepare", "file.txt"], "found str; a config comes first, and a corpus behind it: declutr prepare configs/"),
    (["prepare", "table.csv", "--plan"], "corpus.paths=[table.csv]"),
    (["prepare", "cpu-smal.yaml"], "did you mean `configs/cpu-small.yaml`?"),
    (["prepare", "good.yaml", "corpus.text_field=3"], "two kinds: corpus.text_field='\"...\"'\n"),
    (["prepare", "good.yaml", "output=my: "], "two kinds: output='\"...\"'\n"),
    (["prepare", "good.yaml", "corpus.paths=[void.jsonl]"], "hold no documents; check corpus.paths = ['void.jsonl']"),
    (["adapt", "docs", "void.jsonl", "--output", "x", "--address", "localhost:1"], "--address localhost:1: no Ray clu"),
    (["report", "docs", "--output", "file.txt"], ("--output file.txt: ", "is a file; name a folder")),
    (["evaluate", "--download", "file.txt", "--tasks", "CR"], "--download file.txt: is a file; name a folder"),
    (["evaluate", "hashed-words:4", "--pairs", "table.csv"], "has no column query and no text; did you mean `txet`?"),
    (["evaluate", "hashed-words:4", "--pairs", "pairs.csv", "--documents", "table.csv"], "omit --documents if"),
    (["copy", "docs", "s3:/bucket/x"], ("s3:/bucket/x", "two slashes")), (["copy", "docs", ""], "an empty path"),
    (["reproduce", "scd-table3", "--seeds", "a,b"], "--seeds: a,b: must be whole numbers, separated by commas"),
    (["copy", "docs", "s4://bucket/x"], "Protocol not known: s4. Use s3://, gs://"),
    (["index", "file.txt", "--output", "x"], "copy the note, too"), (["inspect", "docs"], "name one of them"),
    (["embed", "index", "file.txt", "--output", "x.npy"], "index is an index, not an encoder"),
    (["embed", "index", "file.txt", "--output", "s3://b/x.npy"], "--output: 's3://b/x.npy' is an address; name"),
    (["embed", "hashed-words:4", "a*b", "--output", "x.npy"], "texts in memory: declutr.load(MODEL).encode"),
    (["prepare", "good.yaml", "output=docs/out"], "is inside the input 'docs'"),
    (["prepare", "good.yaml", "output=/proc/nope"], "nothing can be written in /proc"),
    (["prepare", "good.yaml", "output=s3://bucket"], "names no folder in the bucket"),
    (["prepare", "good.yaml", "output=s3:///x"], "output = 's3:///x': names no bucket; write s3://BUCKET/FOLDER"),
    (["copy", "docs", "gs://"], "gs://: names no bucket; write gs://BUCKET/FOLDER"),
    (["copy", "docs", "file://"], "file://: names no folder; write file:///FOLDER"),
    (["prepare", "good.yaml", "corpus.paths=[$NOT_SET/x]"], "$NOT_SET is not set"),
    (["prepare", "good.yaml", "corpus.paths=./my texts"], "1 problem(s)\n  - corpus.paths = './my texts'"),
    (["prepare", "good.yaml", "corpus.paths=5"], "1 problem(s)\n  - corpus.paths = 5"),
    (["prepare", "good.yaml", "tokenizer={kind: pretrained, name: ./none}", "output=file.txt"],
     ("no such folder", "name a folder")),
    (["why", "empty.yaml", "--step", "1"], "found nothing"), (["why", "good.yaml"], "give --step, --document or both"),
    (["why", "good.yaml", "--step", "1", "spans.max_token=1"], "did you mean `spans.max_tokens`?"),
    (["report", "docs", "nowhere"], "nowhere: no such file or folder"),
    (["verify-gradients", "good.yaml", "spans.max_token=1"], "did you mean `spans.max_tokens`?"),
    (["verify-gradients", "good.yaml", "--documents", "0"], "at least 1"),
    (["verify-gradients"], "required: config; `declutr verify-gradients --help` lists"),
    (["evaluate", "--mteb", "STSBenchmark"], "--mteb takes one ENCODER or more"),
    (["evaluate", "hashed-words:4", "--mteb", "STSBenchmark", "--pretrained", "x"], "no --pretrained"),
    (["evaluate", "hashed-words:4", "--mteb", "STSBenchmark", "--data", "docs"], "not allowed with argument"),
    (["evaluate", "hashed-words:4"], "is required"),
    (["report", "point"], "point is a checkpoint, not"), (["train", "good.yaml", "data=run"], "run is a run"),
    (["index", "nowhere.npy", "--output", "out"], "nowhere.npy: no such file; name a file of embeddings: declutr"),
    (["embed", "./exprt", "file.txt", "--output", "x.npy"], "no such file or folder; did you mean `export`?"),
    (["embed", "docs", "file.txt", "--output", "x.npy"], "docs is no encoder: it has neither config.json nor modules"),
    (["export", "shards", "--to", "onnx", "--output", "out"], "shards holds prepared shards, not an encoder"),
    (["evaluate", "hashed-words:4", "--data", "nowhere"], "--data nowhere: no such folder; `declutr evaluate --downlo"),
    (["index", "e.npy", "--outp", "new"], "--outp is unknown, did you mean `--output`?"),  # a beginning is no name
    (["index", "e.npy", "–output=new"], "not with `–`; write `--output`"),
    (["train", "good.yaml", "-plan"], "write `--plan`"),
    (["inspect", "gs://bucket/x"], "declutr inspect reads folders: declutr copy gs://bucket/x FOLDER"),
    (["inspect", "docs", "--document", "s3://bucket/x:3"], "docs holds no manifest.json"),  # the name of a document
    (["report", "gcs://bucket/x"], "declutr report reads folders: declutr copy gcs://bucket/x FOLDER"),
    (["copy", "file.txt", "out"], "neither is an address"), (["copy", "file.txt", "s3://bucket/x"], "is not a folder"),
    (["prepare", "good.yaml", "corpus.paths=[table.csv]"], "table.csv: no column 'text'; found id, txet; did you mean"),
    (["prepare", "good.yaml", "corpus.text_field=[a, a]"], "a name is given twice"),
    (["search", "index", " "], "the query is empty"),
    (["index", "file.txt", "--output", "x", "--weight", "2", "--lexical", "idf"], "--lexical, --weight: for hybrid"),
    (["adapt", "owner/name", "file.txt", "--output", "x", "--pairs", "table.csv"], "columns are id, txet\n"),
    (["embed", "hashed-words:4", "odd.zzz", "--output", "x.npy"], "--format"),
    (["embed", "hashed-words:4", "table.csv", "--output", "x.npy"], "no column 'text'; found id, txet; did you mean"),
    (["embed", "hashed-words:4", "file.txt", "--output", "x.npy", "--workers", "-1"], "--workers -1: "),
    (["embed", "hashed-words:4", "file.txt", "--output=~no-such-user/x.npy"], "no home folder"),
    (["embed", "hashed-words:4", "file.txt", "--output", "caf\udce9.npy"], "the name is not UTF-8"),
    (["embed", "hashed-words:4", "apple " * 80, "--output", "x.npy"], "480 characters are no path"),
    (["evaluate", "hashed-words:4", "--data", "file.txt"], "--data file.txt: is a file; name the folder"),
    (["copy", "docs", "https://example.com/x"], "https://example.com/x: it takes no files; name a bucket"),
    (["copy", "docs", "memory://x"], "memory://x: it takes no files"),
    (["search", "index", "-"], "a query is not read from a pipe"), (["train", "/dev/null"], "is a pipe or a device"),
    (["search", "index/index.json", "a"], "name the index, and queries behind it: declutr search index QUERY"),
    (["report", "run"], "run: is no run (it has no config.yaml)"),
    (["inspect", "model"], "model is an encoder, but no run exported"),
    (["train", "good.yaml", "auxiliary_tasks=x"], "must be a section with settings: auxiliary_tasks.NAME"),
    (["embed", "pointer", "file.txt", "--output", "x.npy"], "is a pointer of git-lfs, not the file; run"),
    (["evaluate", "hashed-words:4", "--pairs", "list.json"], "write one JSON object a line"),
    (["demo", "run=docs"], "run = docs: holds"),
    (["embed", "file.txt", "model", "--output", "x.npy"], "; model is an encoder, which comes first"),
    (["report", "index", "--output", "docs"], "--output docs: holds "),
    (["evaluate", "hashed-words:4", "--pairs", "pairs.csv", "--output", "docs"], "docs: holds a.txt, not scores"),
    (["export", "model", "--to", "static", "--corpus", "docs", "--output", "docs/x"], "docs/x: is inside the input"),
    (["embed", "docs", "--model", "hashed-words:4", "--output", "x.npy"], "MODEL is given by its place, without --mod"),
    (["doctor", "--fix"], "unrecognized arguments: --fix; a setting is written key=VALUE"),
    (["embed", "hashed-words:4", "docs", "-o", "x.npy"], "; -o is unknown, did you mean `--output`?"),
    (["prepare", "good.yaml", "corpus.paths=[rows.jsonl]", "corpus.text_field=b"], "no key 'b'; found text"),
    (["train", "good.yaml", "scaling.num_workers=1,4"], "write [1,4]"),
    (["search", "index", "a", "-o", "x"], "unrecognized arguments: -o x; `declutr search --help`"),
    (["prepare", "--config", "good.yaml"], "CONFIG is given by its place, without --config"),
    (["report", "file.txt"], "file.txt: is a file; name the folder of a run, or of shards"),
    (["inspect", "docs", "--json"], "docs: --json and --fast are of a run's checkpoints"),
    (["train", "good.yaml", "data=docs"], "no manifest.json: no whole output of `prepare`; prepare the t"),
    (["prepare", "good.yaml", "corpus.paths=[tables]", "corpus.format=csv"], "or several to join (files likewise: 3)"),
    (["report", "index", "--output", "x.html"], "x.html: is a folder, in which report.html is written"),
    (["adapt", "model", "model", "--output", "x"], "model: is an encoder; name documents"),
    (["demo", "run=new", "data=docs"], "data = docs: the demo trains on what it prepares"),
    (["demo", "run=new", "export=best"], "export = best: the demo judges on rows that would choose"),
    (["train", "good.yaml", "spans=3"], "must be a section with settings: spans.num_anchors, spans.num_positives"),
    (["prepare", "good.yaml", "corpus.paths=[shards]"], "it is shards, without texts; name the documents"),
    (["reproduce", "siblings", "mlm-start"], "mlm-start: a setting is written key=value, and a command runs one item"),
    (["reproduce", "siblings", "--data", "file.txt"], "--data file.txt: is a file; name the folder"),
    (["prepare", "good.yaml", "session.address=127.0.0.1:1"], "session.address = 127.0.0.1:1: no Ray cluster answers"),
    (["reproduce", "good.yaml"], "good.yaml is no item, which has a title and scales"),
    (["prepare", "good.yaml", "tokenizer=500"], "tokenizer = 500: must be a section with settings"),
]  # fmt: skip
CASES = [
    *((["train", config], told) for config, told in CONFIGS),
    *((["train", "good.yaml", *given], told) for given, told in SETTINGS),
    *(([command, place, *rest], "") for command, rest in COMMANDS.items() for place in PLACES),
    *OTHERS,
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder full of what a command does not want."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "link").symlink_to("nothing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setattr(logging.getLogger("declutr"), "handlers", [])  # of the test before, whose stream is closed
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def everything(folder):
    return sorted((str(path), path.lstat().st_mtime_ns if path.is_file() else 0) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "told"), CASES, ids=[" ".join(arguments)[:60].replace("\0", "NUL") for arguments, _ in CASES]
)
def test_wrong_use_gives_one_message_and_nothing_else(place, capsys, arguments, told):
    before = everything(place)
    try:
        status = main(arguments)
    except SystemExit as usage:
        status = usage.code
    error = capsys.readouterr().err
    assert status in (1, 2)
    assert error.strip()
    assert all(fact in error for fact in ([told] if isinstance(told, str) else told)), error
    assert "Traceback" not in error
    assert everything(place) == before
    assert not ray.is_initialized()


REFUSALS = """import json, sys
from declutr.cli.main import main
for arguments in json.load(sys.stdin):
    status = main(arguments)
    late = sorted({"torch", "transformers", "ray"} & set(sys.modules))
    print(f"status {status}, loaded {late}", file=sys.stderr)
"""


def test_wrong_use_is_refused_before_torch_and_ray_are_loaded(place):
    """One process for all commands: the first that loads one of them is the first that fails."""
    runs.word_shards(place / "words")
    runs.write_config(place / "words.yaml", train=runs.train_values("words", "begun"))
    (place / "held").mkdir()
    train = ["train", "words.yaml"]
    cases = [
        ([*train, "objective={kind: simcse}"], "objective.kind = simcse reads sentences"),
        ([*train, "batch_documents=1000"], "batch_documents = 1000: the shards hold only 20 training documents"),
        ([*train, "spans.max_tokens=17"], "spans.max_tokens = 17: the shards were prepared for at most 16"),
        ([*train, "scaling.num_workers=999"], "scaling.num_workers: 999 workers are more than"),
        (["evaluate", "hashed-words:4", "--data", "words"], "--data words: has neither downstream/ nor probing/"),
        (["evaluate", "hashed-words:4", "--data", "words", "--tasks", "STSB"], "--tasks: no task 'STSB'; did you mean"),
        (["adapt", "model", "table.csv", "--output", "out"], "--text-field = text: "),
        ([*train, "run=held"], f"another command works here (host {socket.gethostname()}, pid"),
        (["train", "good.yaml", "optim.lrr=1"], "did you mean `optim.lr`?"),
        (["train", "good.yaml"], "data = d"), (["train", "twice.yaml"], "'train' is given twice"),
        (["verify-gradients", "good.yaml", "optim.lrr=1"], "did you mean `optim.lr`?"),
        (["demo", "--config", "good.yaml", "optim.lrr=1"], "did you mean `optim.lr`?"),
        (["why", "twice.yaml", "--step", "1"], ""), (["adapt", "hashed-words:16", ".", "--output", "out"], ""),
        (["export", "good.yaml", "--to", "onnx", "--output", "out"], ""),
        (["embed", "hashed-words:8", "no.txt", "--output", "out.npy"], "no such file or folder"),
        (["embed", "good.yaml", "twice.yaml", "--output", "out.npy"], ""),
        (["index", "file.txt", "--output", "out"], "has no note file.txt.json"),
        (["adapt", "./nothing", "good.yaml", "--output", "out"], "no such file or folder"),
        (["adapt", "./nothing", "good.yaml", "--output", "out", "--minutes", "0"], ""),
        (["adapt", "owner/name", "good.yaml", "--output", "out", "--pairs", "nothing.jsonl"], ""),
        (["adapt", "nothere", "file.txt", "--output", "out"], "nothere cannot be loaded: there is no such folder here"),
        (["embed", "nothere", "file.txt", "--output", "out.npy"], "HF_HUB_OFFLINE is set"),
        (["export", "nothere", "--to", "onnx", "--output", "out"], "HF_HUB_OFFLINE is set"),
    ]  # fmt: skip
    commands = json.dumps([arguments for arguments, _ in cases])
    before = everything(place)
    with RunLock(place / "held", print):
        done = run_python("-c", REFUSALS, folder=None, env={"HF_HUB_OFFLINE": "1"}, input=commands)
    assert everything(place) == before
    parts = done.stderr.split("status 1, loaded []\n")
    assert len(parts) == len(cases) + 1, done.stderr
    assert "Traceback" not in done.stderr
    for (_, message), part in zip(cases, parts, strict=False):
        assert message in part


def test_the_version_is_said(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("declutr ")


def test_a_deleted_folder_and_closed_streams_are_no_fault_of_this_code(tmp_path):
    words = f"{sys.executable} -c 'import sys; from declutr.cli.main import main; sys.exit(main(sys.argv[1:]))'"
    lines = {
        "mkdir gone; cd gone; rmdir ../gone; {} inspect x": (1, "the current folder was deleted; change to another")
    }
    lines |= {"mkdir d; {} copy d file://$PWD/there >&- 2>&-": (0, "")}
    for line, (status, message) in lines.items():
        done = subprocess.run(["sh", "-c", line.format(words)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
