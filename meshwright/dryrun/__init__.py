"""The dry run executes one rank of a job without the other ranks, on `meta` (nothing is computed) or a real device."""
