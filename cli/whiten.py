"""`declutr whiten`."""

import argparse

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr whiten",
        description="Fit an encoder to prepared documents without training: whiten its embeddings by their covariance "
        "within documents.",
    )
    parser.add_argument("encoder", metavar="ENCODER", help="folder or name of the encoder")
    parser.add_argument("shards", metavar="SHARDS", type=path_argument, help="documents prepared with its tokenizer")
    parser.add_argument("--output", type=path_argument, required=True, help="folder to create")
    parser.add_argument("--power", type=float, help="power of the covariance (0.25); 0.5 whitens completely")
    parser.add_argument("--shrinkage", type=float, help="weight of the identity beside the covariance (0.1)")
    parser.add_argument("--center", action="store_true", help="subtract the mean first; costs general similarity")
    parser.add_argument("--passages", type=int, help="passages of a document, spread evenly over it (4)")
    parser.add_argument("--passage-tokens", type=int, help="longest passage, in tokens without special ones (62)")
    parser.add_argument("--address", help="address of a Ray cluster")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the encoder")
    given = parser.parse_args(arguments)
    from declutr.adaptation.whiten import WhitenConfig, whiten
    from declutr.adaptation.whitening import WhiteningError
    from declutr.common.cluster import SessionError
    from declutr.common.config import first_problem
    from declutr.common.console.logs import setup_logging
    from declutr.evaluation.encoders.protocol import EncoderError
    from declutr.pipeline.shards.manifest import ShardError

    setup_logging("whiten")
    named = {name: value for name, value in vars(given).items() if value is not None}
    output, address = named.pop("output"), named.pop("address", None)
    try:
        config = WhitenConfig.model_validate(named | {"shards": str(given.shards)})
        sums = whiten(config, output, address)
    except (WhiteningError, EncoderError, ShardError, SessionError, ValueError, OSError) as error:
        return refused(first_problem(error, WhitenConfig) if isinstance(error, ValueError) else error)
    print(f"{output}: whitened by {sums.spans:,} passages of {sums.documents:,} documents; rebuild existing indexes")
    return 0
