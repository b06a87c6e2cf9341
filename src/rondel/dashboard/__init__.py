"""`rondel dashboard`: runs and plans as a local web page. It reads run folders and writes nothing.

tail      a journal's new lines              pages    the routes: JSON of what is beside, the page itself, what is new
columns   a run's rows, by metric            door     who may look
sample    some of them, at once              server   where it listens, until a signal
run       events -> columns, findings        page/    what the browser runs, no build step
views     what each view is told of a run    vendor/  uPlot, Preact and htm as their makers ship them
rollouts  the answers of a step              asking   what the sliders ask
"""
