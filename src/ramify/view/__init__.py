"""`ramify view`: a local page for runs, rollouts and token trees.

One idea: the page shows what `why`, `show` and `metrics` print, from the same queries. A running run is asked at its
status address for what only its processes know; everything else is read from the last commit of its files, so looking
at a run costs it nothing. Queries return plain data; the server sends it as JSON, and an exported page contains it.
"""
