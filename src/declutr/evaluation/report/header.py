"""Head of the page: title, totals, the main findings, and the settings."""

import math

import yaml

from declutr.common.bootstrap import MIN_ROWS
from declutr.common.credentials import redact
from declutr.evaluation.report.content import Content
from declutr.evaluation.report.markup import Html, details, in_mib, join, share, tag
from declutr.pipeline.job.outcome import labels_hint, lines_hint
from declutr.pipeline.readers.skipped import describe_skipped
from declutr.pipeline.shards.content import size_noun
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

_PREVIEW = 12
_BATCH = 16
"""Documents of the paper's batch, and the default."""


def header(content: Content) -> Html:
    """Title, totals that add up, facts, main findings, settings."""
    prepared = tag("time", f"{content.prepared:%Y-%m-%d %H:%M} UTC", datetime=content.prepared.isoformat())
    return tag(
        "header",
        tag("p", "Corpus report", class_="kind"),
        tag("h1", tag("bdi", content.name)),
        tag(
            "p",
            join("Prepared ", prepared, " (time of its manifest) by ", tag("code", "declutr prepare"), "."),
            class_="lead",
        ),
        _equation(content),
        _facts(content),
        tag("h2", "At a glance", id="glance"),
        tag("ul", *(tag("li", line) for line in _glance(content)), class_="glance"),
        _settings(content),
    )


def _equation(content: Content) -> Html:
    """Documents read = kept + dropped + failed."""
    totals = content.manifest.totals
    parts: list[Html] = []
    for sign, name in (("", "read"), ("=", "kept"), ("+", "dropped"), ("+", "failed")):
        if sign:
            parts.append(tag("span", sign, class_="sign"))
        told = share(totals[name], totals["read"]) if name != "read" else content.noun
        number = tag("strong", totals[name], id=f"total-{name}")
        parts.append(tag("span", number, tag("span", name), tag("small", told), class_=f"term {name}"))
    return tag("p", *parts, class_="equation")


def _facts(content: Content) -> Html:
    manifest = content.manifest
    totals, unit = manifest.totals, size_noun(manifest.content.kind)
    read, of_tokens = (
        ("Text read", "without special tokens") if content.media is None else ("Files read", "in all rows")
    )
    shard_bytes = sum(shard.num_bytes for shard in manifest.shards)
    facts: list[tuple[str, object, str]] = [
        (f"{unit.capitalize()} kept", tag("span", totals["num_tokens"], id="total-num_tokens"), of_tokens),
        (read, in_mib(totals["text_bytes"]), f"{in_mib(content.kept_tally.text_bytes)} of it kept"),
        ("Input", in_mib(totals["num_bytes"]), "as stored, compressed or not"),
        ("For training", totals["kept_train"], f"and {totals['kept_held_out']:,} held out"),
        ("Shards", len(manifest.shards), in_mib(shard_bytes)),
        (
            f"{'Longest' if content.media is None else 'Largest'} {manifest.noun.removesuffix('s')}",
            totals["longest_tokens"],
            f"{unit}, kept or not",
        ),
        *_tokenizer_facts(manifest.tokenizer),
        _content_fact(content),
    ]
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note")) for name, value, note in facts),
        class_="facts",
    )


def _tokenizer_facts(tokenizer: TokenizerInfo | None) -> list[tuple[str, object, str]]:
    """The tokenizer of texts; nothing for images and audio."""
    if tokenizer is None:
        return []
    origin = "trained on this corpus" if tokenizer.kind == "train" else "pretrained"
    vocabulary = f"{tokenizer.vocab_size:,} tokens, {origin}"
    return [("Tokenizer", vocabulary, f"fingerprint {tokenizer.fingerprint[:_PREVIEW]}")]


def _content_fact(content: Content) -> tuple[str, object, str]:
    """The kind of rows; for documents the room that they have for spans."""
    manifest, geometry = content.manifest, content.manifest.geometry
    if manifest.content.kind == "documents":
        return (
            "Geometry",
            f"{geometry.num_anchors} anchors, spans up to {geometry.max_tokens:,} tokens",
            f"shortest document kept: {content.found.shortest:,} tokens",
        )
    if content.media is not None:
        return "Content", manifest.content.kind, f"{len(manifest.labels):,} labels"
    hypotheses = ", ".join(f"{number:,} {label}" for label, number in manifest.labels.items())
    return "Content", manifest.content.kind, f"hypotheses: {hypotheses}" if hypotheses else "one text a row"


def _glance(content: Content) -> list[str]:
    """Findings that matter before training starts."""
    totals, kept = content.manifest.totals, content.kept_tally
    part = "the text" if content.media is None else "their bytes"
    lines = [
        readiness(content),
        f"{share(totals['kept'], totals['read'])} of the {content.noun} and "
        f"{share(kept.text_bytes, totals['text_bytes'])} of {part} are kept.",
    ]
    if totals["kept"]:
        mean = totals["num_tokens"] / totals["kept"]
        noun = content.noun.removesuffix("s")
        unit = size_noun(content.manifest.content.kind)
        of_text = f"a token stands for {kept.text_bytes / max(1, totals['num_tokens']):.2f} bytes of text."
        if content.media is not None:
            of_text = f"its file has {kept.text_bytes / totals['kept']:,.0f} bytes on average."
        lines.append(
            f"A kept {noun} has {mean:,.0f} {unit} on average, about {content.median_tokens():,} in the median; "
            f"{of_text}"
        )
    reasons = content.reasons()
    if reasons:
        reason, _, tally = reasons[0]
        lines.append(
            f"Most losses: {reason}, {tally.read:,} {content.noun} ({share(tally.read, totals['read'])}) with "
            f"{share(tally.text_bytes, totals['text_bytes'])} of {part}."
        )
    sources = content.sources()
    if len(sources) > 1:
        name, top = sources[0]
        lines.append(
            f"The largest source, {name}, gives {share(top.kept_tokens, totals['num_tokens'])} of the kept "
            f"{size_noun(content.manifest.content.kind)}."
        )
    if totals["failed"]:
        lines.append(f"{totals['failed']:,} {content.noun} could not be read: see the places below before training.")
    if hint := lines_hint(
        totals["read"], content.manifest.dropped, content.manifest.config, content.found.sources.all()
    ):
        lines.append(f"{hint}.")
    if conflict := labels_hint(content.manifest):
        lines.append(f"{conflict}.")
    lines += [f"{line}." for line in describe_skipped(content.manifest.skipped)]
    return lines


def _settings(content: Content) -> Html:
    """Settings, hashes and versions, collapsed at first."""
    manifest, tokenizer = content.manifest, content.manifest.tokenizer
    settings = redact(yaml.safe_dump(manifest.config, sort_keys=False, allow_unicode=True, width=math.inf))
    versions = ", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items()))
    return details(
        "Settings and versions",
        tag("p", f"Versions: {versions}; schema {manifest.schema_version}."),
        tag("p", "Hash of the settings: ", tag("code", manifest.config_hash)),
        *([tag("p", "Fingerprint of the tokenizer: ", tag("code", tokenizer.fingerprint))] if tokenizer else []),
        tag("pre", settings),
        id="settings",
    )


def readiness(content: Content) -> str:
    """One sentence: yes, or what to change first."""
    obstacles, totals, read = _obstacles(content), content.manifest.totals, content.coverage
    if obstacles:
        return f"Worth training on? Not yet: {'; '.join(obstacles)}."
    about = ""
    if read is not None:
        about = (
            f", of which three passes read {share(read.read_tokens, read.num_tokens)} of the tokens "
            f"({read.pass_tokens / read.num_documents:,.0f} of {read.num_tokens / read.num_documents:,.0f} tokens of a "
            "document a pass)"
        )
    return (
        f"Worth training on? Nothing here speaks against it: {totals['kept_train']:,} training {content.noun}{about}, "
        f"and {totals['kept_held_out']:,} held out to measure the result. `declutr train CONFIG --plan` estimates time "
        "and memory."
    )


def _obstacles(content: Content) -> list[str]:
    """Reasons not to train yet, each with its remedy."""
    totals, found = content.manifest.totals, []
    if totals["kept_train"] < _BATCH:
        found.append(f"{totals['kept_train']:,} training {content.noun} are less than a batch of {_BATCH}; add more")
    if totals["kept_held_out"] < 2 * MIN_ROWS:
        found.append(
            f"{totals['kept_held_out']:,} held-out {content.noun} do not show whether training helped, which "
            f"needs {2 * MIN_ROWS}; increase validation_fraction or add {content.noun}"
        )
    kept, text_bytes = content.kept_tally.text_bytes, totals["text_bytes"]
    if 2 * kept < text_bytes and (reasons := content.reasons()):
        part = "text" if content.media is None else "bytes"
        found.append(f"only {share(kept, text_bytes)} of the {part} is kept, most is lost as {reasons[0][0]}")
    return found
