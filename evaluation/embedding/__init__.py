"""Files of texts to files of embeddings, to an index, and the encoder to ONNX."""
