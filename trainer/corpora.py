"""The setting `data`: one corpus, or several with their weights, and what those must have in common."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from declutr.common.config import Strict
from declutr.pipeline.shards.manifest import Manifest, data_hash
from declutr.trainer.data.plan import MOST_TURNS, whole_shares


class Corpus(Strict):
    """One of several corpora."""

    path: str
    """Folder or address of its prepared shards."""
    weight: float = Field(gt=0)
    """Its share of the rows, relative to the other weights."""


def _checked(data: str | list[Corpus]) -> str | list[Corpus]:
    """Refuses weights with too many digits; a single corpus needs no weight."""
    if isinstance(data, str):
        return data
    if len(data) == 1:
        return data[0].path  # as if it stood alone, so that both forms have one hash
    weights = [corpus.weight for corpus in data]
    if (period := sum(whole_shares(weights))) > MOST_TURNS:
        rounded = [max(1, round(1000 * weight / max(weights))) for weight in weights]
        rows = f"{period:,}" if period < 10**12 else "10^12 or more"
        raise ValueError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} are exact only after {rows} rows, at most "
            f"{MOST_TURNS:,} are possible; give fewer digits, such as {', '.join(map(str, rounded))}"
        )
    return data


def _as_written(value: Any) -> Any:
    if isinstance(value, list):  # a name alone has the weight 1
        return [{"path": corpus, "weight": 1} if isinstance(corpus, str) else corpus for corpus in value]
    if isinstance(value, dict):
        raise ValueError("must be a folder, an address, or a list of corpora: [{path: FOLDER, weight: 1}, ...]")  # noqa: TRY004
    return value


Data = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[Corpus], Field(min_length=1), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
    AfterValidator(_checked),
    BeforeValidator(_as_written),
]


def places_of(data: str | list[Corpus]) -> tuple[str, ...]:
    """Folders or addresses of the corpora."""
    return (data,) if isinstance(data, str) else tuple(corpus.path for corpus in data)


def shares_of(data: str | list[Corpus]) -> tuple[int, ...]:
    """Shares of the corpora as whole numbers."""
    return (1,) if isinstance(data, str) else whole_shares([corpus.weight for corpus in data])


def corpora_problems(
    places: Mapping[str, str],  # their folders or addresses by the settings that name them
    corpora: Sequence[Manifest],  # their manifests
) -> list[str]:
    """Reasons why several corpora cannot be read as one, one line for each that differs from the first."""
    labels = [f"{key} = {place}" for key, place in places.items()]
    first_traits, problems = _traits(corpora[0]), []
    for number, manifest in enumerate(corpora[1:], 1):
        traits = _traits(manifest)
        other = [key for key in first_traits if traits.get(key) != first_traits[key]]
        same = [
            name
            for name, corpus in zip(labels, corpora[:number], strict=False)
            if data_hash(corpus) == data_hash(manifest)
        ]
        if other:
            reason = "; ".join(f"{key} is {traits.get(key)}, not {first_traits[key]}" for key in other)
            problems.append(f"{labels[number]}: was prepared otherwise than {labels[0]} ({reason}); prepare both alike")
        elif same:
            problems.append(f"{labels[number]}: holds the same shards as {same[0]}; name each corpus once")
    return problems


def _traits(manifest: Manifest) -> dict[str, object]:
    """Traits that corpora must share to be read as one, by setting of `prepare`."""
    kind = manifest.content.kind
    traits: dict[str, object] = {"content.kind": kind}
    if manifest.tokenizer is not None:
        # For people; the whole one is compared with the run's.
        traits["tokenizer"] = manifest.tokenizer.fingerprint[:12]
    if kind == "documents":  # windows follow from it; rows of short texts have none
        geometry = {f"geometry.{key}": value for key, value in manifest.geometry.model_dump().items()}
        traits |= {**geometry, "short_documents": manifest.short_documents}
    if kind == "audio":
        names = ("sample_rate", "num_mel_bins", "frame_ms", "hop_length_ms", "max_seconds")
        traits |= {f"content.{name}": getattr(manifest.content, name) for name in names}
    return traits
