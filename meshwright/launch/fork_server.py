"""Loaded by the server that forks our launcher's ranks, and by nothing else: it ends with the launcher, and they with
it."""

from meshwright.launch.rank_process import end_with_parent

end_with_parent()
