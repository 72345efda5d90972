"""What a report and `declutr inspect` say of images and clips, against the shards."""

import base64
import html
import io
import re

import numpy as np
import pytest
from mediafiles import png, sound, tone
from mediashards import prepare_media
from messages import says
from PIL import Image

from declutr.cli.main import main
from declutr.evaluation.report.content import bar_charts, gather
from declutr.report.corpus import write_corpus_page
from declutr.evaluation.report.rows import thumbnail
from declutr.pipeline.shards.shards import ShardSet

HOSTILE = '"><script>alert(1)<'


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """60 images of two sizes with three labels, one of them hostile; two that are no images."""
    labels = ["cat", "dog", HOSTILE]
    files = {f"{labels[n % 3]}/{n}.png": png(n, (40, 30) if n % 4 else (20, 21)) for n in range(60)}
    files |= {"cat/\u202ebad.png": b"x", f"{HOSTILE}/bad.png": b"x"}
    return prepare_media(tmp_path_factory.mktemp("images"), "images", files)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    files = {f"{n % 2}_{n}.wav": sound(tone(0.2 + 0.05 * n, number=n)) for n in range(12)}
    files["0_silent.wav"] = sound(np.zeros((9000, 1)))
    return prepare_media(tmp_path_factory.mktemp("clips"), {"kind": "audio", "label": r"^(\d)"}, files)


def pictures_of(page):
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', page)]


@pytest.mark.slow
def test_charts_are_those_of_the_shards(images, clips):
    folder, manifest = images
    content = gather(folder)
    charts = {chart.name: {bar.label: bar.value for bar in chart.bars} for chart in bar_charts(content)}
    assert charts["labels"] == manifest.labels == {"cat": 20, "dog": 20, HOSTILE: 20}
    assert charts["sizes"] == {"40 x 30": 45, "20 x 21": 15}
    assert charts["reasons"] == {"not_an_image": 2}
    folder, manifest = clips
    content = gather(folder)
    frames = [1 + (int(16_000 * (0.2 + 0.05 * n)) - 400) // 160 for n in range(12)]
    assert content.media.longest_frames == max(frames)
    assert content.media.seconds == pytest.approx(sum((n - 1) * 0.01 + 0.025 for n in frames))
    assert content.statuses["train"].kept_tokens + content.statuses["held-out"].kept_tokens == sum(frames)


def test_the_page_shows_thumbnails_and_permits_nothing_else(images, tmp_path):
    folder, _ = images
    page = write_report(folder, tmp_path).read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    kinds = [part.split()[0] for part in html.unescape(policy).split(";")]
    assert kinds == ["default-src", "img-src", "style-src", "base-uri", "form-action"]
    assert "img-src data:;" in policy
    shown = pictures_of(page)
    assert 10 <= len(shown) <= 24
    assert all(Image.open(io.BytesIO(data)).size in ((40, 30), (20, 21)) for data in shown)
    assert "<script" not in page
    assert "alert(1)" in page  # as text
    assert "\u202e" not in page
    assert "pixels" in page
    assert "Tokenizer" not in page
    assert "tokens" not in page.replace("total-num_tokens", "")
    again = write_report(folder, tmp_path / "again").read_text()
    assert again == page
    assert {path.name for path in (tmp_path / "charts").iterdir()} >= {"lengths.png", "labels.png", "sizes.png"}


def test_clips_are_shown_by_their_energies(clips, tmp_path):
    folder, _ = clips
    page = write_report(folder, tmp_path).read_text()
    shown = pictures_of(page)
    assert len(shown) >= 5
    grey = np.asarray(Image.open(io.BytesIO(shown[0])).convert("L"))
    assert grey.min() < 10 < 245 < grey.max()
    assert "silent" in page
    says(page, "longest clip")


def test_a_thumbnail_is_encoded_again():
    data = png(1, (300, 200))
    marked = data[:33] + b"\x00\x00\x00\x04tEXthtml\xf1\xf1\xf1\xf1" + data[33:]
    uri = thumbnail({"image": marked})
    assert uri is None or b"html" not in base64.b64decode(uri.partition(",")[2])
    uri = thumbnail({"image": data})
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (96, 64)
    assert thumbnail({"image": data[:500]}) is None
    assert thumbnail({"image": b"GIF89a"}) is None


def test_inspect_shows_sizes_and_labels(images, clips, capsys):
    folder, _ = images
    assert main(["inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    says(told, "62 images read", "60 kept", "0 dropped", "2 failed")
    says(told, "images", "3 labels")
    assert "pixels," in told
    assert "tokenizer" not in told
    row = ShardSet(folder, "train").take(np.array([5])).to_pylist()[0]
    assert main(["inspect", str(folder), "--document", f"{row['source']}:0"]) == 0
    told = capsys.readouterr().out
    assert f"{row['width']} x {row['height']} pixels" in told
    assert f"label {row['label']!r}" in told
    folder, _ = clips
    assert main(["inspect", str(folder), "--document", "0_silent.wav"]) == 0
    told = capsys.readouterr().out
    says(told, "dropped: silent", "9000 samples", "0")
    says(told, "bytes", "not decoded")
    assert main(["inspect", str(folder)]) == 0
    assert "frames, energies" in capsys.readouterr().out
