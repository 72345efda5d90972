"""`declutr publish`."""

import argparse

from declutr.common.console.terminal import refused


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status, 1 if nothing was published."""
    parser = argparse.ArgumentParser(
        prog="declutr publish",
        description="Write the folder that others need to use an encoder: weights, tokenizer, card, and an ONNX export "
        "if one is next to it. Or send it to the hub, into a private repository.",
    )
    parser.add_argument("model", metavar="MODEL", help="a run, its export, or the output of `declutr adapt`")
    parser.add_argument("target", metavar="TARGET", help="folder to create (./NAME), or OWNER/NAME on the hub")
    parser.add_argument("--license", metavar="SPDX", help="licence of the encoder, such as apache-2.0, or other")
    parser.add_argument("--yes", action="store_true", help="send it to the hub; without it, nothing is sent")
    given = parser.parse_args(arguments)
    from declutr.common.hub import hub_name
    from declutr.common.paths import expand
    from declutr.encoders.protocol import EncoderError
    from declutr.evaluation.publish import PublishError, publication, send, write_folder

    try:
        found = publication(given.model, given.license)
        name = hub_name(given.target)
        if name is None:
            write_folder(found, expand(given.target))
        elif given.yes:
            address = send(found, name)
    except (PublishError, EncoderError) as error:
        return refused(error)
    print("\n".join(found.lines()))
    if name is None:
        print(f"{given.target}: written; nothing was sent")
        return 0
    if given.yes:
        print(f"{address}: sent; the repository is private until you change it there")
        return 0
    return refused(f"{name}: nothing was sent. --yes sends these files to the hub; ./{name} would be a folder")
