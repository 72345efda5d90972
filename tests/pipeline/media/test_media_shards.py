"""Shards of images and clips from folders, archives and tables: rows, labels, reasons; totals close."""

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import tar
from mediafiles import animated, claimed_png, picture, png, sound, spread, stored, tone
from messages import all_of, says
from PIL import Image
from shardfolders import poke, spoil

from declutr.common.errors import ShardError
from declutr.common.storage import hash_file
from declutr.inspection.describe import locate
from declutr.pipeline.job.outcome import labels_hint, summary
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.readers.blobs import with_labels
from declutr.pipeline.readers.corpus import Blob
from declutr.pipeline.shards.manifest import MANIFEST, load_manifest
from declutr.pipeline.shards.media import media_problem
from declutr.pipeline.shards.shards import ShardSet, check_shards
from declutr.pipeline.shards.writer import media_schema
from declutr.report.corpus import gather, glance

BAD_IMAGES = [b"text", png(1)[:60], png(2)[:900], b"GIF89a" + b"\1" * 40, animated()[:200], b"BM" + b"\7" * 80]
BAD_SOUNDS = [b"text", sound(tone())[:50], sound(tone(), format="FLAC")[:90], b"OggS" + b"\1" * 90, b"RIFF" * 20]
DIGITS = {"kind": "audio", "label": r"^(\d)_", "max_seconds": 1.0}


def taken(folder, split="train"):
    shards = ShardSet(folder, split)
    return {(row["source"], row["offset"]): row for row in shards.take(np.arange(shards.num_documents)).to_pylist()}


def pixels(row):
    return np.asarray(Image.open(io.BytesIO(row["image"])))


@pytest.fixture
def folder(tmp_path):
    files = {f"cats/{n}.png": png(n) for n in range(5)}
    files |= {f"dogs/{n}.jpg": stored(picture(n), "JPEG") for n in range(4)}
    files |= {"dogs/loop.gif": animated(), "README.md": b"read me", "cats/notes.txt": b"x", "cats/.hidden.png": png(8)}
    return spread(tmp_path / "in", files | {"alone.png": png(70), "cats/text.png": b"a text named .png"})


def test_class_folders_become_labelled_rows_and_labels_follow_a_pattern(folder, make_media, prepare_media, tmp_path):
    manifest, ledger, out = prepare_media(make_media({"kind": "images", "shortest_edge": 16}, folder))
    failed, notes = {"no_label": 1, "not_an_image": 1}, {"first_frame": 1, "smaller": 10}
    assert (manifest.labels, manifest.failed, manifest.notes) == ({"cats": 5, "dogs": 5}, failed, notes)
    assert {kind: skip.files for kind, skip in manifest.skipped.items()} == {".md": 1, ".txt": 1}
    assert manifest.tokenizer is None
    assert "pillow" in manifest.versions
    assert ShardSet(out, "train").take(np.arange(3)).schema.equals(media_schema("images"))
    row = taken(out)["cats/3.png", 0]
    assert (row["width"], row["height"], row["label"]) == (21, 16, "cats")
    assert (pixels(row) == np.asarray(picture(3).resize((21, 16), Image.Resampling.BICUBIC))).all()
    entry = ledger["dogs/loop.gif", 0]
    assert (entry.detail, entry.num_tokens, entry.text_bytes) == ("first_frame, smaller", 21 * 16, len(animated()))
    assert manifest.totals["num_tokens"] == 10 * 21 * 16
    assert "content.label=null" in ledger["alone.png", 0].detail
    manifest, _, out = prepare_media(make_media({"kind": "images", "label": None}, folder), tmp_path / "absent")
    labels = {row["label"] for row in taken(out).values()}
    assert (manifest.labels, manifest.failed, labels) == ({}, {"not_an_image": 1}, {""})
    content = {"kind": "images", "label": r"^(?:cats|dogs)/(\w+)\."}
    manifest, _, _ = prepare_media(make_media(content, folder), tmp_path / "other")
    assert manifest.labels == {"0": 2, "1": 2, "2": 2, "3": 2, "4": 1, "loop": 1}
    long = make_media({"kind": "images", "label": "^(.*)$"}, spread(tmp_path / "l", {"a/" * 130 + "x.png": png()}))
    assert prepare_media(long, tmp_path / "long")[0].failed == {"bad_label": 1}


def test_clips_become_rows_with_their_samples(tmp_path, make_media, prepare_media):
    files = {f"{n}_ann_{k}.wav": sound(tone(0.4 + 0.3 * k, number=n)) for n in range(3) for k in range(3)}
    files |= {"x_ann_0.wav": sound(tone()), "1_silent.wav": sound(np.zeros((9000, 1))), "1.mp3": b"ID3"}
    files |= {"1_short.wav": sound(tone()[:9]), "2_half.flac": sound(tone(2.0), format="FLAC")}
    manifest, ledger, out = prepare_media(make_media(DIGITS, spread(tmp_path / "in", files)))
    assert (manifest.labels, manifest.failed) == ({"0": 3, "1": 3, "2": 4}, {"no_label": 1})
    assert (manifest.dropped, manifest.notes) == ({"silent": 1, "too_short": 1}, {"cut": 1})
    row = taken(out)["1_ann_2.wav", 0]
    assert (row["num_frames"], len(row["frames"])) == (98, 98 * 128)
    assert ShardSet(out, "train").take(np.arange(1)).schema.equals(media_schema("audio"))
    says(ledger["1_short.wav", 0].detail, "9 samples", "400")


SPEAKERS = {"anna": (3, 2), "bela": (1, 2), "carl": (2,), "dora": (4, 1)}
"""Chapters of each speaker, with their numbers of clips, as in LibriSpeech: SPEAKER/CHAPTER/clip."""


def test_speakers_are_the_folders_above_and_the_most_frequent_are_kept(tmp_path, make_media, prepare_media):
    """Counted over all units, copies included; dora and anna have five rows each, bela three, carl two."""
    files = {
        f"{speaker}/{speaker}-{chapter}/{clip}.wav": sound(tone(0.1 + 0.04 * row, number=10 * chapter + clip))
        for row, (speaker, chapters) in enumerate(SPEAKERS.items())
        for chapter, clips in enumerate(chapters)
        for clip in range(clips)
    }
    folder = spread(tmp_path / "in", files | {"bela/loose.wav": sound(tone(number=99))})
    settings = {"duplicates": {"exact": True}, "unit_mib": 0.02}
    manifest, ledger, _ = prepare_media(make_media({"kind": "audio", "label": "parent_folder"}, folder, **settings))
    counts = {speaker: sum(chapters) for speaker, chapters in SPEAKERS.items()}
    assert (manifest.labels, manifest.failed) == (counts, {"no_label": 1})
    says(ledger["bela/loose.wav", 0].detail, "no folder")
    for number, kept in ((3, "anna bela dora"), (2, "anna dora"), (1, "anna"), (9, "anna bela carl dora")):
        content = {"kind": "audio", "label": "parent_folder", "max_labels": number}
        manifest, ledger, out = prepare_media(make_media(content, folder, **settings), tmp_path / f"top{number}")
        assert manifest.labels == {name: counts[name] for name in kept.split()}
        rare = sum(counts.values()) - sum(manifest.labels.values())
        assert manifest.dropped == ({"rare_label": rare} if rare else {})
        assert {row["label"] for row in taken(out).values()} == set(kept.split())
    assert ledger["carl/carl-0/0.wav", 0].status == "train"


def test_copies_in_two_classes_are_told_and_counted_among_the_labels(tmp_path, make_media, prepare_media):
    """Ten classes in units of their own; c/0 and f/0 are copies of a/0 and d/0, d/1 is one of d/0."""
    same = {"c/0": 0, "f/0": 300, "d/1": 300}
    files = {f"{name}/{row}": 100 * place + row for place, name in enumerate("abcdefghij") for row in range(2)} | same
    folder = spread(tmp_path / "in", {f"{name}.png": png(number) for name, number in files.items()})
    config = make_media({"kind": "images"}, folder, duplicates={"exact": True}, unit_mib=0.004)
    manifest, ledger, out = prepare_media(config)
    assert len(manifest.ledgers) > 3
    assert manifest.dropped == {"duplicate": 1, "duplicate_other_label": 2}
    assert ledger["d/1.png", 0].status == "duplicate"
    says(ledger["f/0.png", 0].detail, "similarity 1.00", "'d' there", "'f' here")
    hint = labels_hint(manifest)
    says(hint, "2 copies", "label")
    says(hint, "'c/0.png'", "kept", "'a' there", "'c' here")
    assert "2 duplicate_other_label" in summary(manifest, "out")
    assert f"{hint}." in glance(gather(out))
    says(locate(out, "f/0.png"), "copy", "kept", "d/0.png")
    unlabelled = make_media({"kind": "images", "label": None}, folder, duplicates={"exact": True})
    manifest, _, _ = prepare_media(unlabelled, tmp_path / "unlabelled")
    assert (manifest.dropped, labels_hint(manifest)) == ({"duplicate": 3}, None)
    files = {f"{name}/{number}.png": png(7 if name == "b" else number) for name in "ab" for number in range(3)}
    folder = spread(tmp_path / "few", files | {"a/2.png": b"no image"})
    config = make_media({"kind": "images", "max_labels": 1}, folder, duplicates={"exact": True})
    manifest, _, _ = prepare_media(config, tmp_path / "top")
    assert (manifest.labels, manifest.dropped) == ({"b": 1}, {"duplicate": 2, "rare_label": 2})


MEMBERS = [("a/000.png", png(0)), ("a/000.cls", b"3\n"), ("a/001.cls", b"7"), ("a/001.png", png(1))]
MEMBERS += [("a/002.left.png", png(2)), ("a/002.right.png", png(3)), ("a/002.json", b"{}"), ("a/002.cls", b"5")]
MEMBERS += [("a/003.png", png(4)), ("a/004.cls", b"9"), ("b.png", png(5)), ("b.txt", b"a caption")]


@pytest.mark.parametrize("packed", ["shard.tar", "shard.tar.gz", "outer.tar"])
def test_labels_of_webdataset_go_to_images_of_their_name(packed, tmp_path, make_media, prepare_media):
    data = tar(MEMBERS)
    data = gzip.compress(data) if packed.endswith("gz") else data
    data, inner = (tar([("in/shard.tar", data)]), "outer.tar!in/shard.tar") if packed == "outer.tar" else (data, packed)
    manifest, ledger, out = prepare_media(make_media("images", spread(tmp_path / "in", {packed: data})))
    labels = {source.removeprefix(f"{inner}!"): row["label"] for (source, _), row in taken(out).items()}
    expected = {"a/000.png": "3", "a/001.png": "7", "a/002.left.png": "5", "a/002.right.png": "5"}
    assert labels == expected | {"a/003.png": "a"}, "without .cls: its folder"
    assert (manifest.dropped, manifest.failed) == ({"label_alone": 1, "other_file": 2}, {"no_label": 1})
    assert ledger[f"{inner}!a/004.cls", 0].status == "label_alone"


def test_an_archive_is_never_cut_between_an_image_and_its_label(tmp_path, make_media, prepare_media):
    members = [(f"{n:03}.{end}", data) for n in range(30) for end, data in (("png", png(n)), ("cls", b"%d" % (n % 4)))]
    config = make_media("images", spread(tmp_path / "in", {"a.tar": tar(members)}), unit_mib=0.03)
    units, _ = plan_units(config.corpus, config.unit_mib, None, config.content)
    assert len(units) > 3
    manifest, _, out = prepare_media(config)
    assert manifest.labels == {"0": 8, "1": 8, "2": 7, "3": 7}
    labels = {source: row["label"] for (source, _), row in taken(out).items()}
    assert labels == {f"a.tar!{n:03}.png": str(n % 4) for n in range(30)}


def test_images_of_one_name_are_held_within_a_limit():
    lengths, counts, sources = [], [], []

    class Measured(bytes):
        def __len__(self):
            lengths.append(0)
            return super().__len__()

    blobs = [Blob("", f"a!x.{n}.png", 0, Measured(b"x" * 10), None) for n in range(50)]

    def records():
        for number, blob in enumerate(blobs):
            counts.append(number - len(sources))
            yield blob

    for record in with_labels(records(), 100):
        sources.append(record.source)  # noqa: PERF401 - `records` looks at it
    assert sources == [blob.source for blob in blobs]
    assert max(counts) <= 12
    assert len(lengths) <= 2 * len(blobs), "of each image when it comes and when it goes"


def table(path, images, labels, names=None, struct=True, rows=4, column="image"):
    values = [{"bytes": one, "path": f"{n}.png"} for n, one in enumerate(images)] if struct else images
    content = pa.table({column: values, "label": labels})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        content = content.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(content, path, row_group_size=rows)
    return path


def test_parquet_with_class_names(tmp_path, make_media, prepare_media):
    images = [png(n) for n in range(8)] + [None, b"broken", claimed_png(60_000, 60_000)]
    labels = [n % 3 - (n == 7) * 2 for n in range(11)]
    table(tmp_path / "in" / "folder" / "a.parquet", images, labels, ["cat", "dog", "bird"])  # a class of no row
    manifest, ledger, out = prepare_media(make_media("images", tmp_path / "in", unit_mib=0.02))
    assert manifest.labels == {"cat": 3, "dog": 2, "bird": 2}
    assert manifest.failed == dict.fromkeys(("no_label", "not_an_image", "null", "too_many_pixels"), 1)
    assert sorted(offset for _, offset in ledger) == list(range(11))
    row = taken(out)["folder/a.parquet", 5]
    assert (row["label"], pixels(row).tolist()) == ("bird", np.asarray(picture(5)).tolist())


@pytest.mark.parametrize("struct", [False, True])
def test_a_label_or_a_path_that_is_not_utf8_loses_its_row_alone(struct, tmp_path, make_media, prepare_media):
    raw = pa.array([b"a", b"\xff", b"c"])
    words, images = pa.StringArray.from_buffers(3, *raw.buffers()[1:]), pa.array([png(n) for n in range(3)])
    column = pa.StructArray.from_arrays([images, words], ["bytes", "path"]) if struct else images
    labels = pa.array(["a", "b", "c"]) if struct else words
    pq.write_table(pa.table({"image": column, "label": labels}), tmp_path / "a.parquet")
    manifest, ledger, _ = prepare_media(make_media("images", tmp_path / "a.parquet"))
    assert (manifest.labels, manifest.failed) == ({"a": 1, "c": 1}, {"invalid_utf8": 1})
    says(ledger["a.parquet", 1].detail, "label", "path")


@pytest.mark.parametrize("packed", [False, True])
def test_parquet_of_bytes_and_words_becomes_labelled_rows(packed, tmp_path, make_media, prepare_media):
    sounds, labels = [sound(tone(number=n)) for n in range(6)], ["a", "b", "", None, "a", "é"]
    path = table(tmp_path / "in" / "a.parquet", sounds, labels, struct=False, column="wave")
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
        path.rename(path.with_suffix(".parquet.gz"))
    manifest, _, _ = prepare_media(make_media({"kind": "audio", "audio": "wave"}, tmp_path / "in"))
    assert (manifest.labels, manifest.failed) == ({"a": 2, "b": 1, "é": 1}, {"no_label": 2})


def test_another_column_and_files_of_texts_are_named_before_any_work(tmp_path, make_media):
    path = table(tmp_path / "a.parquet", [png()], [0], column="img")
    folder = spread(tmp_path / "in", {"a/x.jsonl": b'{"text": "a"}', "b.jpeg.txt": b"x"})
    for content, place, words in (
        ("images", path, ("content.image = image", "a.parquet", "'image'", "['img', 'label']")),
        ({"kind": "images", "image": "label"}, path, ("int64", "bytes")),
        ("images", folder, ".bmp .gif .jpeg"),
        ("audio", folder / "a" / "x.jsonl", ("audio", ".flac .oga")),
    ):
        config = make_media(content, place)
        says(plan_units(config.corpus, config.unit_mib, None, config.content)[1][0], words)


def test_a_file_above_the_limit_is_a_failure(tmp_path, make_media, prepare_media):
    folder = spread(tmp_path / "in", {"a/large.png": png(1, (300, 300)), "a/small.png": png(2)})
    corpus = {"kind": "files", "paths": [str(folder)], "max_document_mib": 0.05}
    manifest, ledger, _ = prepare_media(make_media("images", corpus=corpus))
    assert manifest.failed == {"too_large": 1}
    says(ledger["a/large.png", 0].detail, "corpus.max_document_mib")


@pytest.mark.parametrize("kind", ["images", "audio"])
def test_bytes_are_the_same_twice_also_of_failures(kind, tmp_path, make_media, prepare_media):
    """Messages of libraries hold addresses in memory, which are others in every process."""
    good, bad = (png, BAD_IMAGES) if kind == "images" else (lambda n: sound(tone(number=n)), BAD_SOUNDS)
    end = "png" if kind == "images" else "wav"
    files = {f"a/{n}.{end}": good(n) for n in range(4)} | {f"b/{n}.{end}": data for n, data in enumerate(bad)}
    config, digests = make_media(kind, spread(tmp_path / "in", files), validation_fraction=0.3), []
    for name in ("one", "two"):
        manifest, ledger, out = prepare_media(config, tmp_path / name)
        assert sum(manifest.failed.values()) == len(bad)
        assert not [entry.detail for entry in ledger.values() if "0x" in (entry.detail or "")]
        digests.append({path.name: hash_file(path) for path in sorted(out.rglob("*.arrow"))})
    assert digests[0] == digests[1]


WRONG = {
    "images": [
        ({"width": [41, 40]}, 0, "no PNG of 41 x 30"),
        ({"width": [40, 30], "height": [30, 40]}, 1, "no PNG of 30 x 40"),
        ({"image": [png(0), stored(picture(1), "BMP")]}, 1, "no PNG of 40 x 30"),
        *[({"image": [b"", png(1)]}, 0, "no PNG"), ({"width": [-40, 40], "height": [-30, 30]}, 0, "-40 x -30")],
        ({"width": [40, 2**16], "height": [30, 2**16]}, 1, "65536 x 65536"),
    ],
    "audio": [
        *[({"num_frames": [3, 1]}, 0, "num_frames = 3"), ({"frames": [[np.inf] * 8, [1.0] * 4]}, 0, "not finite")],
        ({"frames": [[1.0] * 8, [1.0] * 5]}, 1, "5 energies, with 4 bands"),
        ({"frames": [[1.0] * 8, [1.0, 2.0, np.nan, 1.0]]}, 1, "not finite"),
        ({"num_frames": [0, 1], "frames": [[], [1.0] * 4]}, 0, "num_frames = 0"),
    ],
}
GOOD = {
    "images": {"image": [png(0), png(1)], "width": [40, 40], "height": [30, 30]},
    "audio": {"frames": [[1.0] * 8, [2.0] * 4], "num_frames": [2, 1]},
}


@pytest.mark.parametrize(("kind", "changes", "row", "told"), [(k, *one) for k, rows in WRONG.items() for one in rows])
def test_rows_that_contradict_themselves_are_named(kind, changes, row, told):
    types = {field.name: field.type for field in media_schema(kind)}

    def batch(columns):
        return pa.record_batch({name: pa.array(values, types[name]) for name, values in columns.items()})

    assert media_problem(batch(GOOD[kind]), kind, 4) is None
    place, problem = media_problem(batch(GOOD[kind] | changes), kind, 4)
    assert (place, told in problem) == (row, True)


def test_a_changed_shard_is_refused_by_the_reader(folder, make_media, prepare_media):
    _, _, out = prepare_media(make_media("images", folder))
    spoil(out, poke("width", (1, np.int32), {0: 39}), "train-00000.arrow")
    manifest = json.loads((out / MANIFEST).read_bytes())
    with pytest.raises(ShardError, match="39 x 30 pixels"):
        ShardSet(out, "train").take(np.arange(2))
    assert "39 x 30" in check_shards(out, full=True)[0]
    (out / MANIFEST).write_text(json.dumps(manifest | {"config": manifest["config"] | {"content": "documents"}}))
    with pytest.raises(ShardError, match=all_of("no tokenizer", "documents")):
        load_manifest(out)
