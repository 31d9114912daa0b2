"""A suite for NCCL that needs one GPU, which all ranks share. Every case also runs on Gloo without a GPU.

`python -m tests.nccl` runs it (see `__main__.py`). `pytest tests/nccl` runs it too, with the same runner.
"""
