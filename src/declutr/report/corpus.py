"""The page of a prepared corpus: its contents in figures and examples, and what they say before a training.

Examples are some kept documents, and some for each reason for which documents are not kept.
"""

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from declutr.common import seeding
from declutr.common.bootstrap import MIN_ROWS
from declutr.common.errors import ShardError, redact
from declutr.inspection.describe import decoder
from declutr.pipeline.job.outcome import labels_hint, lines_hint, lost_hint, unknown_hint
from declutr.pipeline.media.images import PILLOW_ERRORS
from declutr.pipeline.readers.skipped import describe_skipped
from declutr.pipeline.shards.content import LABELS, size_noun
from declutr.pipeline.shards.ledger import REJECTED, Entry
from declutr.pipeline.shards.lookup import entries_at
from declutr.pipeline.shards.manifest import MANIFEST, SPLITS, Manifest, load_manifest
from declutr.pipeline.shards.shards import ShardSet, check_shards, other_tokenizer
from declutr.pipeline.shards.windows import TOO_SHORT, shortest_document
from declutr.report.page import REPORT, Role, share, write_page
from declutr.report.survey import CONTAMINATED, Lengths, Matches, Survey, Tally, TextSurvey, survey, survey_texts, total

_SHOWN_NAMES = 20
_SHOWN_SETS = 40
_BATCH = 16  # documents of the paper's batch, and the default
_SHOWN_CHARACTERS = 600
_KEPT_EXAMPLES = 4
_KEPT_PICTURES = 24
_THUMBNAIL_PIXELS = 96  # longest side of a thumbnail
_TOKENS_READ = 1_000  # more than 600 characters in any language, and bounded whatever the length of the document


@dataclass(frozen=True, slots=True)
class Example:
    """The beginning of a document and its facts. `text` is None where it was not written."""

    source: str
    offset: int
    num_tokens: int | None
    text_bytes: int | None
    detail: str | None
    text: str | None
    picture: str | None = None  # Thumbnail of an image or clip as a data URI; None for texts


@dataclass(frozen=True)
class Content:
    """A prepared corpus in figures and examples. Made by `gather`."""

    name: str  # name of its folder
    prepared: datetime  # time of its manifest
    manifest: Manifest
    survey: Survey  # sums over its ledgers
    kept: list[Example]  # examples of kept rows
    rejected: dict[str, list[Example]]  # examples of others, by reason
    statuses: dict[str, Tally]  # documents by split, or by the reason why they are not kept
    texts: TextSurvey | None  # figures of short texts; None for documents, images and audio

    @property
    def noun(self) -> str:
        """Noun for its rows."""
        return self.manifest.noun

    @property
    def media(self) -> bool:
        """True for images and clips, False for texts."""
        return self.manifest.tokenizer is None

    @property
    def unit(self) -> str:
        """Noun for the sizes of its rows: tokens, pixels or frames."""
        return size_noun(self.manifest.content.kind)

    @property
    def kept_tally(self) -> Tally:
        """All kept documents."""
        return total(self.statuses.get(split, Tally()) for split in SPLITS)

    def reasons(self) -> list[tuple[str, Role, Tally]]:
        """Reasons for which documents are not kept, the most frequent first."""

        def role(reason: str) -> Role:
            return "failed" if reason in self.manifest.failed else "short" if reason == TOO_SHORT else "dropped"

        rows = [(reason, role(reason), tally) for reason, tally in self.statuses.items() if reason not in SPLITS]
        return sorted(rows, key=lambda row: (-row[2].read, row[0]))

    def sources(self) -> list[tuple[str, Tally]]:
        """The sources with the most kept tokens, by top folder where there are many, and the rest as one."""
        sources = self.survey.sources
        groups = {name: [tally] for name, tally in sources.by_name.items()}
        if len(groups) > _SHOWN_NAMES:  # a corpus of a file a document would be twenty files, and "others"
            groups = defaultdict(list)
            for name, tally in sources.by_name.items():
                folder, slash, _ = name.partition("/")
                groups[folder + slash].append(tally)
        return sources.largest({name: total(tallies) for name, tallies in groups.items()}, _SHOWN_NAMES)

    def languages(self) -> list[tuple[str, Tally]]:
        """Languages by kept tokens; empty when no language was determined."""
        rows = self.survey.languages.largest(self.survey.languages.by_name, _SHOWN_NAMES)
        return [(name or "not determined", tally) for name, tally in rows] if any(name for name, _ in rows) else []

    def contaminated(self) -> tuple[int, list[Matches]]:
        """Documents dropped because they share text with an evaluation set, and the matches by set."""
        matches = sorted(self.survey.matches.values(), key=lambda match: (-match.kept - match.dropped, match.name))
        return self.statuses.get(CONTAMINATED, Tally()).read, matches[:_SHOWN_SETS]

    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers of rows by name, such as a label, by the title of their table; at most 20 names, then the others."""
        manifest, counts = self.manifest, dict[str, dict[str, int]]()
        if self.texts is not None and manifest.labels:
            numbers = sorted(self.texts.hypotheses.items())
            counts["Premises by number of hypotheses"] = {f"{number} hypotheses": rows for number, rows in numbers}
        counts[f"Kept {'hypotheses' if self.texts else manifest.noun} by label"] = manifest.labels
        counts[f"Kept {manifest.noun} that were changed"] = manifest.notes
        return {title: _most_frequent(names) for title, names in counts.items() if names}

    @property
    def shortest(self) -> int:
        """Tokens of the shortest document that is kept."""
        return shortest_document(self.manifest.geometry, self.manifest.short_documents)

    @property
    def limits(self) -> dict[int, str]:
        """Meanings of the lengths in tokens that have a line in the drawing, ascending; of equal ones the last."""
        geometry = self.manifest.geometry
        limits = {geometry.max_tokens: "longest span", shortest_document(geometry): "room for all anchors"}
        return dict(sorted((limits | {self.shortest: "shortest document kept"}).items()))

    def lengths(self) -> dict[Role, Lengths]:
        """Lengths of documents that were kept, too short, and dropped otherwise."""
        roles: dict[Role, Lengths] = {"kept": Lengths(), "short": Lengths(), "dropped": Lengths()}
        for status, lengths in self.survey.lengths.items():
            roles["kept" if status in SPLITS else "short" if status == TOO_SHORT else "dropped"].update(lengths)
        return roles


def _most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """The most frequent names, and all others as one."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    first, other_items = order[:_SHOWN_NAMES], order[_SHOWN_NAMES:]
    rest = {f"({len(other_items):,} others)": sum(number for _, number in other_items)} if other_items else {}
    return dict(first) | rest


def gather(folder: Path) -> Content:
    """Reads the contents of a report."""
    manifest = load_manifest(folder)
    if problems := [*check_shards(folder), *other_tokenizer(folder, manifest)]:
        raise ShardError("\n".join(problems))
    sums = survey(folder, manifest)
    return Content(
        name=folder.absolute().name,
        # UTC, so that the page has the same bytes in every time zone
        prepared=datetime.fromtimestamp(int((folder / MANIFEST).stat().st_mtime), UTC),
        manifest=manifest,
        survey=sums,
        kept=kept_examples(folder, manifest),
        rejected=rejected_examples(folder, sums),
        statuses=sums.statuses.by_name,
        texts=survey_texts(folder, manifest),
    )


def glance(content: Content) -> list[str]:
    """Findings that matter before training starts."""
    totals, kept, noun = content.manifest.totals, content.kept_tally, content.noun
    part = "their bytes" if content.media else "the text"
    lines = [
        readiness(content),
        f"{share(totals['kept'], totals['read'])} of the {noun} and "
        f"{share(kept.text_bytes, totals['text_bytes'])} of {part} are kept.",
    ]
    if totals["kept"]:
        of_text = f"a token stands for {kept.text_bytes / max(1, totals['num_tokens']):.2f} bytes of text."
        if content.media:
            of_text = f"its file has {kept.text_bytes / totals['kept']:,.0f} bytes on average."
        mean = totals["num_tokens"] / totals["kept"]
        lines.append(f"A kept {noun.removesuffix('s')} has {mean:,.0f} {content.unit} on average; {of_text}")
    if totals["failed"]:
        lines.append(f"{totals['failed']:,} {noun} could not be read: see the places below before training.")
    hints = (
        lines_hint(totals["read"], content.manifest.dropped, content.manifest.config, content.survey.sources.by_name),
        labels_hint(content.manifest),
        lost_hint(content.manifest),
        unknown_hint(content.manifest),
        *describe_skipped(content.manifest.skipped),
    )
    return lines + [f"{hint}." for hint in hints if hint]


def readiness(content: Content) -> str:
    """One sentence: yes, or what to change first."""
    obstacles, totals = list(_obstacles(content)), content.manifest.totals
    if obstacles:
        return f"Worth training on? Not yet: {'; '.join(obstacles)}."
    return (
        f"Worth training on? Nothing here speaks against it: {totals['kept_train']:,} training {content.noun}, "
        f"and {totals['kept_held_out']:,} held out to measure the result. `declutr train CONFIG --plan` estimates "
        "time, memory and the share of the tokens that a run reads."
    )


def _obstacles(content: Content) -> Iterator[str]:
    """Reasons not to train yet, each with its remedy."""
    totals, noun = content.manifest.totals, content.noun
    if totals["kept_train"] < _BATCH:
        yield f"{totals['kept_train']:,} training {noun} are less than a batch of {_BATCH}; add more"
    if totals["kept_held_out"] < 2 * MIN_ROWS:  # one half chooses a checkpoint, the other judges it
        yield (
            f"{totals['kept_held_out']:,} held-out {noun} do not show whether training helped, which needs "
            f"{2 * MIN_ROWS}; increase validation_fraction or add {noun}"
        )
    kept, text_bytes = content.kept_tally.text_bytes, totals["text_bytes"]
    if 2 * kept < text_bytes and (reasons := content.reasons()):
        part = "bytes" if content.media else "text"
        yield f"only {share(kept, text_bytes)} of the {part} is kept, most is lost as {reasons[0][0]}"


def write_corpus_page(folder: Path, output: Path | None = None) -> Path:
    """Writes `report.html` on a corpus to `output`, or to its folder `report`; returns the page.

    The same corpus with the same times of its files gives the same bytes.
    """
    from declutr.report.charts import draw_histogram  # loads matplotlib

    content = gather(folder)
    lengths = content.lengths()
    marks = {} if content.media else {limit: f"{limit:,}: {name}" for limit, name in content.limits.items()}
    title, axis = f"Number of {content.noun} by {content.unit}", f"{content.unit} (logarithmic)"
    path = (output or folder / REPORT) / "report.html"
    settings = yaml.safe_dump(content.manifest.config, sort_keys=False, allow_unicode=True, width=math.inf)
    write_page(
        path,
        "corpus.html",
        f"Corpus report: {content.name}",
        pictures=content.media,
        content=content,
        totals=content.manifest.totals,
        lines=glance(content),
        settings=redact(settings),
        measured=sum(counts.total() for counts in lengths.values()),
        drawing=None if content.texts else draw_histogram("lengths", title, axis, content.shortest, lengths, marks),
        shown_characters=_SHOWN_CHARACTERS,
    )
    return path


def kept_examples(folder: Path, manifest: Manifest) -> list[Example]:
    """Some training rows, drawn by the corpus's seed, in its order; decoded texts, for images and clips labels."""
    number = manifest.totals["kept_train"]
    if not number:
        return []
    zero = np.zeros(1, np.uint64)
    media = manifest.tokenizer is None
    examples = _KEPT_PICTURES if media else _KEPT_EXAMPLES
    drawn = seeding.unit(seeding.words(int(manifest.config.get("seed", 0)), "report", zero, zero, examples))[0]
    numbers = np.unique(np.floor(drawn * number).astype(np.int64))  # in corpus order, and a row once
    rows = ShardSet(folder, "train").take(numbers).to_pylist()
    if media:
        return [Example(row["source"], row["offset"], None, None, None, row["label"], thumbnail(row)) for row in rows]
    decode = decoder(folder)
    return [
        Example(row["source"], row["offset"], row["num_tokens"], None, None, _text(decode, row)[:_SHOWN_CHARACTERS])
        for row in rows
    ]


def _text(decode: Callable[[Sequence[int]], str], row: dict[str, Any]) -> str:
    """The beginning of a row's text; of several texts, those that begin within it, each after its label."""
    if "starts" not in row:
        return decode(row["tokens"][:_TOKENS_READ])
    bounds = pairwise([*row["starts"], row["num_tokens"]])
    texts = [decode(row["tokens"][start:end]) for start, end in bounds if start < _TOKENS_READ]
    labels = [f"{LABELS[label]}: " if label >= 0 else "" for label in row["labels"][: len(texts)]]
    return "\n".join(label + text for label, text in zip(labels, texts, strict=True))


def thumbnail(row: dict[str, Any]) -> str | None:
    """A small PNG of a row as a data URI: the image, or the energies of a clip; None if it cannot be decoded.

    It is encoded again from pixels, so no byte of the corpus reaches the browser.
    """
    from PIL import Image  # imported here because reports of texts do not need it

    try:
        if "image" in row:
            with Image.open(BytesIO(row["image"]), formats=["PNG"]) as opened:  # no other decoder sees these bytes
                picture = opened.convert("RGB")
            picture.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
        else:
            frames = np.asarray(row["frames"], np.float64).reshape(row["num_frames"], -1)
            low, high = float(frames.min()), float(frames.max())
            scaled = (frames - low) / max(high - low, 1e-9) * 255  # energies may be equal
            grey = np.ascontiguousarray(scaled.T[::-1].astype(np.uint8))  # time to the right, low bands below
            picture = Image.fromarray(grey).resize((2 * _THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
        encoded = BytesIO()
        Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(encoded, "PNG")  # pixels alone, no metadata
    except (Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def rejected_examples(folder: Path, sums: Survey) -> dict[str, list[Example]]:
    """The documents that the survey drew for each reason; with text where `write_rejected` was on."""
    places = {reason: sorted(row[1:] for row in rows) for reason, rows in sums.drawn.items()}
    entries = entries_at(folder, (place for rows in places.values() for place in rows))
    texts = _rejected_texts(folder, entries)
    examples = {
        place: Example(entry.source, entry.offset, entry.num_tokens, entry.text_bytes, entry.detail, texts.get(place))
        for place, entry in entries.items()
    }
    return {reason: [examples[place] for place in rows] for reason, rows in places.items()}


def _rejected_texts(folder: Path, entries: Mapping[tuple[int, int], Entry]) -> dict[tuple[int, int], str]:
    """Reads the first characters of rejected documents; units without a file are left out."""
    texts, places_of = {}, defaultdict[int, dict[tuple[str, int], tuple[int, int]]](dict)
    for place, entry in entries.items():
        places_of[place[0]][entry.source, entry.offset] = place
    for unit, places in places_of.items():
        path = folder / REJECTED / f"{unit:05d}.jsonl.gz"
        if path.exists():  # without `write_rejected` there is none
            with gzip.open(path, "rb") as stream:
                for row in map(json.loads, stream):
                    if drawn := places.get((row["source"], row["offset"])):
                        texts[drawn] = row["text"][:_SHOWN_CHARACTERS]
    return texts
