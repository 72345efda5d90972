"""Settings of the trainer's tests: the same examples in every run, one thread for tiny matrices."""

import torch
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")
torch.set_num_threads(1)
