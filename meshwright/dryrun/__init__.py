"""The dry run: one rank of a cluster that is not there, executed without computing (on `meta`) or on a real device."""
