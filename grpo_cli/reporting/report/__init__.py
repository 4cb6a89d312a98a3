"""The report of a run: one HTML file that needs no network, from what the run has stored.

Start at `page.py`: it reads a run into blocks of JSON (`facts`, `curves`, `completions`) and writes
them, compressed, into assets/page.html.j2 beside the scripts and the plotting library (uPlot, MIT).
May import reporting, checkpoints, data and config. Torch is not loaded.
"""
