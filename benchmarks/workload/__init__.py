"""Made-up inputs, encoders of known sizes and the trainer's own step, which the benchmarks share."""
