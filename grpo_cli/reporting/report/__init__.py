"""The report of a run: one HTML file that needs no network, made from the run's folder.

Start at `page.py`. It reads a run into blocks of JSON (`facts`, `curves`, `completions`) and writes
them, compressed, into assets/page.html.j2 with the scripts and the plotting library (uPlot, MIT).
May import reporting, checkpoints, data and config. Torch is not loaded.
"""
