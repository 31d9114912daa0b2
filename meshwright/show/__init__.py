"""Output for people: units, tables, progress, the live display of a run, its summary, drawings, charts and pages.

Commands and the planner pass in the data to draw. `rich` is imported inside the functions that use it, so that a
command that draws nothing starts without it. No torch.
"""
