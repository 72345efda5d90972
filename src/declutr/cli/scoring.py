"""Parts of `declutr evaluate`: loading of encoders, and their scores on pairs, NanoBEIR and MTEB."""

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from declutr.common.console.terminal import refused

if TYPE_CHECKING:
    from declutr.encoders.protocol import SentenceEncoder
    from declutr.evaluation.retrieval.nanobeir import NanoTest


def with_checkpoints(names: Sequence[str]) -> list[str]:
    """The names, with the checkpoints of a run, oldest first, in place of the run; a run without one stays."""
    from declutr.common.paths import expand_known
    from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in

    scored = list[str]()
    for name in names:
        folder = expand_known(name) / CHECKPOINTS
        steps = steps_in(folder) if folder.is_dir() else []
        scored += [str(checkpoint_path(folder, step)) for step in steps] or [name]
    return scored


def load(
    name: str, options: argparse.Namespace, vocabulary: Collection[str] | None = None, tokenized: bool = False
) -> "SentenceEncoder":
    """Load an encoder as the options say.

    Raises:
        EncoderError: it cannot be loaded, or an option has no effect on it.
    """
    from declutr.common.errors import EncoderError
    from declutr.encoders.loading import load_encoder

    encoder = load_encoder(
        name,
        options.pooling,
        device=options.device,
        vocabulary=vocabulary,
        tokenized=tokenized,
        trust_remote_code=options.trust_remote_code,
        precision=options.precision,
    )
    if options.pooling and not hasattr(encoder, "encoder"):
        raise EncoderError(f"{name}: --pooling {options.pooling} has no effect on word vectors; remove it")
    return encoder


def evaluate_pairs(options: argparse.Namespace) -> int:
    """Score baselines and encoders on the user's pairs; return 1 if one could not be scored."""
    from declutr.evaluation.retrieval.pairs import read_test

    test = read_test(options.pairs, options.documents)
    from declutr.common.errors import EncoderError
    from declutr.encoders.protocol import sizes_of
    from declutr.evaluation.retrieval.compare import score_encoder, score_lexical, write_comparison
    from declutr.evaluation.retrieval.lexicon import Lexicon

    lexicon = Lexicon(test.texts)
    scored, names = score_lexical(test, lexicon), list[str]()
    for name in options.encoders:
        try:
            encoder = load(name, options)
            if encoder.name in names:
                continue
            scored += score_encoder(test, encoder, lexicon, sizes_of(encoder, options.sizes))
        except EncoderError as error:
            return refused(f"{name} is not scored: {error}")
        names.append(encoder.name)
    print(write_comparison(test, scored, names, options.output))
    print(f"\n{options.output / 'pairs.json'} has all numbers")
    return 0


def evaluate_mteb(options: argparse.Namespace) -> int:
    """Score all encoders on MTEB's tasks; return 1 if one could not be scored."""
    from declutr.common.errors import EncoderError
    from declutr.common.extras import missing_extra
    from declutr.common.hub import stay_offline_unless_it_answers
    from declutr.encoders.protocol import sizes_of, with_cuts

    if absent := missing_extra("mteb", "--mteb"):
        sys.stderr.write(f"{absent}\n")
        return 1
    stay_offline_unless_it_answers()  # before MTEB's libraries contact the hub
    from declutr.evaluation.mteb import choose_mteb, score_mteb, write_mteb

    scores, failed = dict[str, dict[str, float]](), False
    tasks = choose_mteb(options.mteb.split(","))
    for name in options.encoders:
        try:
            encoder = load(name, options)
            for variant in with_cuts(encoder, sizes_of(encoder, options.sizes)):
                scores[variant.name] = score_mteb(variant, tasks, options.output, say)
        except EncoderError as error:
            failed = True
            sys.stderr.write(f"not scored: {error}\n")
            continue
        write_mteb(scores, options.output)
    if scores:
        print(f"main scores: {options.output / 'mteb.json'}; all of MTEB's figures: {options.output / 'mteb'}")
    return int(failed)


def evaluate_nanobeir(options: argparse.Namespace, tests: Sequence["NanoTest"]) -> bool:
    """Score encoders on tests of NanoBEIR and write the table; return whether every encoder was scored."""
    from declutr.common.errors import DataError, EncoderError
    from declutr.encoders.protocol import sizes_of
    from declutr.evaluation.retrieval.nanobeir import score_nanobeir, write_nanobeir

    scored, failed, table = dict[str, Any](), False, ""
    for name in dict.fromkeys([*options.encoders, *([options.pretrained] if options.pretrained else [])]):
        try:
            encoder = load(name, options)
            sizes = sizes_of(encoder, options.sizes)
            means_by_size = score_nanobeir(encoder, tests, sizes, say)
        except (EncoderError, DataError) as error:
            failed = True
            sys.stderr.write(f"not scored: {error}\n")
            continue
        scored |= {name if size == encoder.size else f"{name} [{size}]": means for size, means in means_by_size.items()}
        table = write_nanobeir(tests, scored, options.output)
    if table:
        print(f"\n{table}\n{options.output / 'nanobeir.json'} has all measures")
    return not failed


def say(line: str) -> None:
    """Print a progress line at once."""
    print(line, flush=True)
