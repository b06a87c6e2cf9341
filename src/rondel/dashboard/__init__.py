"""`rondel dashboard`: runs and plans as a local web page. It reads run folders and writes nothing.

tail      a journal's new lines          pages    the routes: JSON of everything below, and the page itself
columns   a run's rows, by metric        server   where it listens, until a signal
run       events -> columns, findings    page/    what the browser runs, no build step
rollouts  the answers of a step          vendor/  uPlot, Preact and htm as their makers ship them
"""
