"""Makes the server that forks the launcher's ranks end with the launcher, and the ranks with the server.

Only that server may import this module: importing it is enough.
"""

from meshwright.launch.rank_process import end_with_parent

end_with_parent()
