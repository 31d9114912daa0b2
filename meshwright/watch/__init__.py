"""A page of one or several runs, live or as a file, made from their folders alone. No torch."""
