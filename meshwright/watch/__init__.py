"""The live display, summary, status and web page of runs, made without importing torch."""
