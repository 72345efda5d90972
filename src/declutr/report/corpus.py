"""The page of a prepared corpus: its contents in figures and examples, and what they say before a training."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from declutr.common.bootstrap import MIN_ROWS
from declutr.common.errors import ShardError, redact
from declutr.pipeline.job.outcome import labels_hint, lines_hint, lost_hint, unknown_hint
from declutr.pipeline.readers.skipped import describe_skipped
from declutr.pipeline.shards.content import size_noun
from declutr.pipeline.shards.manifest import MANIFEST, SPLITS, Manifest, load_manifest
from declutr.pipeline.shards.shards import check_shards
from declutr.pipeline.shards.windows import TOO_SHORT, shortest_document
from declutr.report.examples import SHOWN_CHARACTERS, Example, kept_examples, rejected_examples
from declutr.report.page import REPORT, Role, share, write_page
from declutr.report.survey import CONTAMINATED, Lengths, Matches, Survey, Tally, TextSurvey, survey, survey_texts, total

_SHOWN_NAMES = 20
_SHOWN_SETS = 40
_BATCH = 16
"""Documents of the paper's batch, and the default."""


@dataclass(frozen=True)
class Content:
    """A prepared corpus in figures and examples. Made by `gather`."""

    name: str
    """Name of its folder."""
    prepared: datetime
    """Time of its manifest."""
    manifest: Manifest
    survey: Survey
    """Sums over its ledgers."""
    kept: list[Example]
    """Examples of kept rows."""
    rejected: dict[str, list[Example]]
    """Examples of others, by reason."""
    statuses: dict[str, Tally]
    """Documents by split, or by the reason why they are not kept."""
    texts: TextSurvey | None
    """Figures of short texts; None for documents, images and audio."""

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
        limits = {geometry.max_tokens: "longest span", geometry.min_document_tokens: "room for all anchors"}
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
    """Reads the contents of a report.

    Raises:
        ShardError: a file is missing or damaged, or the ledgers contradict the manifest.
    """
    manifest = load_manifest(folder)
    if problems := check_shards(folder):
        raise ShardError("\n".join(problems))
    sums = survey(folder, manifest)
    return Content(
        name=folder.absolute().name,
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

    Raises:
        ShardError: files that are missing or damaged, or ledgers that contradict the manifest.
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
        shown_characters=SHOWN_CHARACTERS,
    )
    return path
