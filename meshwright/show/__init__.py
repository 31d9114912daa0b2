"""What people see: units, tables, progress, the live display of a run, its summary, drawings, charts, pages. No torch.

Commands and the planner use this room; what it draws is passed to it. `rich` is imported where it is used, so that a
command which draws nothing does not wait for it.
"""
