"""RollArt's published results (OSDI '26), reproduced by simulation: a file an experiment.

Each experiment offers `rows(quick) -> list[Row]`; `flows/reproduce.py` runs them all.
"""
