"""A suite for NCCL that needs one GPU, which all ranks share; every case also runs on Gloo without any.

`python -m tests.nccl` runs it (see `__main__.py`), and so does `pytest tests/nccl`, which asks the same runner.
"""
