"""`scripts/gpu_check`: measurements and tests that only a GPU can show, in parts of under nine minutes.

`parts` is the table of all parts, `tasks` their steps, `work` the measurements (each in a process of its own), `needs`
the checks before a part starts, `results` the files, `bounds` targets and rooflines, `report` the tables, `wheels` the
packages for a machine without a network, `rehearsal` all of it on a stand-in for a card.
"""
