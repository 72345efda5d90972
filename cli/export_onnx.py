"""`declutr export-onnx`."""

import argparse

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr export-onnx", description="Export an encoder with pooling to ONNX.")
    parser.add_argument("model", help="as `declutr embed` takes it")
    parser.add_argument(
        "--output", type=path_argument, required=True, help="folder to create: model.onnx, tokenizer.json"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens of an input, special ones included (encoder's limit)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    given = parser.parse_args(arguments)
    from declutr.evaluation.encoders.loading import EncoderError, load_encoder

    try:
        from declutr.evaluation.embedding.onnx import export_onnx, require_onnx

        require_onnx()
        trust = given.trust_remote_code
        encoder = load_encoder(given.model, device="cpu", max_tokens=given.max_tokens, trust_remote_code=trust)
        export_onnx(encoder, given.output)
    except (EncoderError, FileExistsError) as error:
        return refused(error)
    print(f"{given.output}: model.onnx, tokenizer.json")
    return 0
