"""Settings that every test needs before Ray is imported."""

import os

os.environ["RAY_AUTH_MODE"] = "disabled"  # a local session would otherwise write a token to the home folder
os.environ["TOKENIZERS_PARALLELISM"] = "false"
