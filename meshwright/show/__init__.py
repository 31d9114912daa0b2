"""Everything that people see: units, tables, progress, the live display of a run, its summary, drawings, charts and
pages. No torch. Commands and the planner pass in what is to be drawn. `rich` is imported where it is used, so that a
command which draws nothing does not wait for it."""
